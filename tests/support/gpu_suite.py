"""Run every section of benchmarks.gpu, and benchmarks.tune, with the smallest sizes, on a pretended H100.

TRITON_INTERPRET=1 python -m tests.machines.gpu_machine suite FOLDER
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import tune
from benchmarks.gpu import __main__ as suite
from benchmarks.gpu import (
    context,
    experts,
    fp8,
    gpu_tests,
    measure,
    overlap,
    permute,
    precompile,
    routing,
    training,
    transfers,
    tuning,
)
from benchmarks.gpu.shapes import Shape
from moe_dualpipe.models import StageOptions, preset
from moe_dualpipe.pipeline import Balance, Pipeline
from moe_dualpipe.tools.profiler import capture, pair
from tests.machines import gpu_machine, interpreter

SHAPE = Shape(9, 16, 16, 2, 1)
MATMUL, COPY = measure.dense_matmul, measure.device_copy
TESTS = {"gpu/test_large_offsets.py": True, "gpu/test_a.py": True, "kernels/test_b.py": False}


def smaller(patch: pytest.MonkeyPatch, out: Path) -> None:
    """The smallest sizes, fp32 as the interpreter needs it, and sections and workers in this process."""
    interleaved, from_preset, measured = measure.time_interleaved, overlap.PairWorkload.from_preset, overlap.measure
    candidates, orders, profile = tuning.candidate_configs, tuning.with_other_orders, capture.profile
    step, balance, init, done = Pipeline.step, Balance.after_step, dist.init_process_group, subprocess.CompletedProcess

    def queued(pipeline: Pipeline, *batch: torch.Tensor, **options: bool) -> list[torch.Tensor]:
        """Of a step whose kernels are loaded, nothing makes the host wait."""
        pipeline.balance.rate = 0.1
        quick = pipeline._kernels_loaded and pipeline.options.kernels == "triton"
        with gpu_machine.graph() if quick else nullcontext():
            losses = step(pipeline, *batch, **options)
            balance(pipeline.balance, torch.ones(1, 1), pipeline.device)
        return losses

    changes: list[tuple[Any, str, Any]] = [
        (context.Context, "dtype", torch.float32),
        (context, "time_interleaved", lambda clock, cases, *_: interleaved(clock, cases, 1, 1)),
        *((module, "SHAPES", (SHAPE, SHAPE)) for module in (experts, fp8, permute, precompile)),
        *((module, "MAIN_SHAPE", SHAPE) for module in (fp8, permute)),
        (experts, "dense_matmul", lambda device, _: MATMUL(device, True)),
        (permute, "device_copy", lambda device, _: COPY(device, True)),
        (precompile, "torch", SimpleNamespace(bfloat16=torch.float32, device=torch.device)),
        (precompile, "run_commands", lambda commands, *_: [(precompile.main(*one[3:]), "") for one in commands]),
        (routing, "SIZES", ((9, 4, 2),)),
        (transfers, "SIZES", transfers.SMOKE_SIZES), (transfers, "NUM_SMS", (1,)),
        (overlap, "measure", lambda work, folder, _, **options: measured(
            replace(work, dtype=torch.float32), folder, 2, **options | {"rounds": 1})),
        (overlap.PairWorkload, "from_preset", lambda mode, *_, device: from_preset(
            mode, "tiny", 1, 4, 4, device=device)),
        (overlap, "RUNS", dict([*overlap.RUNS.items()][:2])),
        (pair, "StageOptions", partial(StageOptions, kernels="reference")),
        (capture, "profile", lambda activities, **options: profile(activities=activities[:1], **options)),
        (training, "preset", lambda _: replace(preset("tiny"), num_layers=1, hidden_size=32)),
        (training, "SIZE", 2), (training, "LENGTH", 8), (Pipeline, "step", queued),
        (dist, "init_process_group", lambda *_, **__: init("gloo", store=dist.HashStore(), rank=0, world_size=1)),
        (tuning, "run_workers", lambda commands, _: tune.main([*commands[0][3:]])),
        (tuning, "make_problem", lambda shape, device: tuning.Problem.random(shape, torch.float32, device)),
        (tuning, "candidate_configs", lambda *given: candidates(*given) and tuning.smoke_configs(given[0])[:1]),
        (tuning, "with_other_orders", lambda config: orders(config)[:1]),
        (gpu_tests, "ROOT", out),
        (subprocess, "run", lambda command, **_: done(command, suite.main([*command[3:]]))),
    ]  # fmt: skip
    for change in changes:
        patch.setattr(*change)
    for name, passes in TESTS.items():
        (out / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (out / "tests" / name).write_text(f"def test_it():\n    assert {passes}\n")


def defined() -> Iterator[tuple[str, str]]:
    """The file and the name of each function of benchmarks/gpu, except those inside of functions."""
    for path in Path(suite.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        for owner in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
            prefix = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
            yield from ((str(path), prefix + one.name) for one in owner.body if isinstance(one, ast.FunctionDef))


def run_all(out: Path, *only: str) -> None:
    """Prints the functions of benchmarks/gpu that did not run. only: sections; all if there are none."""
    patch, ran = pytest.MonkeyPatch(), set[tuple[str, str]]()
    for change in (interpreter.add_tma_reductions, interpreter.compute_fp8, interpreter.call_directly):
        change(patch)
    smaller(patch, out)
    sys.settrace(lambda frame, *_: ran.add((frame.f_code.co_filename, frame.f_code.co_qualname)))
    suite.main(["--out", str(out), "--training-steps", "2", "--minutes", "60", *(["--only"] * bool(only)), *only])
    assert tune.main(["--out", str(out / "tuned.json"), "--shapes", "8,16,16,2,1"]) == 0
    sys.settrace(None)
    print("did not run:", *sorted(f"{Path(file).stem}.{name}" for file, name in {*defined()} - ran))
