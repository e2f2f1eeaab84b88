"""Run every section of benchmarks.gpu, and benchmarks.tune, with the smallest sizes, on a pretended H100.

TRITON_INTERPRET=1 python -m tests.machines.gpu_machine suite FOLDER
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

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
from moe_dualpipe.models import preset
from moe_dualpipe.tools.profiler import capture
from tests.machines import interpreter

FOLDER = Path(suite.__file__).parent
SHAPE = Shape(9, 16, 16, 2, 1)
TESTS = {"gpu/test_large_offsets.py": True, "gpu/test_a.py": True, "kernels/test_b.py": False}


def smaller(patch: pytest.MonkeyPatch, out: Path) -> None:
    """The smallest sizes, fp32 as the interpreter needs it, and sections and workers in this process."""
    patch.setattr(context.Context, "dtype", torch.float32)
    interleaved, from_preset, measured = measure.time_interleaved, overlap.PairWorkload.from_preset, overlap.measure
    patch.setattr(context, "time_interleaved", lambda clock, cases, *_: interleaved(clock, cases, 1, 1))
    for module in (experts, fp8, permute, precompile):
        patch.setattr(module, "SHAPES", (SHAPE, SHAPE))
        patch.setattr(module, "MAIN_SHAPE", SHAPE, raising=False)
        for name in ("dense_matmul", "device_copy"):
            made = getattr(measure, name)
            patch.setattr(module, name, lambda device, _, made=made: made(device, True), raising=False)
    patch.setattr(precompile, "torch", SimpleNamespace(bfloat16=torch.float32, device=torch.device))
    patch.setattr(routing, "SIZES", ((9, 4, 2),))
    patch.setattr(transfers, "SIZES", transfers.SMOKE_SIZES)
    patch.setattr(transfers, "NUM_SMS", (1,))
    patch.setattr(overlap, "measure", lambda work, folder, _, **options: measured(
        replace(work, dtype=torch.float32), folder, 2, **options | {"rounds": 1}
    ))  # fmt: skip
    patch.setattr(overlap.PairWorkload, "from_preset", lambda mode, *_, device: from_preset(
        mode, "tiny", 1, 4, 4, device=device
    ))  # fmt: skip
    patch.setattr(overlap, "RUNS", dict([*overlap.RUNS.items()][:2]))
    profile = capture.profile
    patch.setattr(capture, "profile", lambda activities, **options: profile(activities=activities[:1], **options))
    patch.setattr(training, "preset", lambda _: replace(preset("tiny"), num_layers=1, hidden_size=32))
    patch.setattr(training, "SIZE", 2)
    patch.setattr(training, "LENGTH", 8)
    init, alone = dist.init_process_group, {"rank": 0, "world_size": 1}
    patch.setattr(dist, "init_process_group", lambda *_, **__: init("gloo", store=dist.HashStore(), **alone))
    in_process = lambda commands, *_: [(precompile.main(*command[3:]), "") for command in commands]  # noqa: E731
    patch.setattr(experts.precompile, "run_commands", in_process)
    patch.setattr(tuning, "run_commands", lambda commands, *_: [(tune.main([*commands[0][3:]]), "")])
    patch.setattr(tuning, "make_problem", lambda shape, device: tuning.Problem.random(shape, torch.float32, device))
    candidates, orders = tuning.candidate_configs, tuning.with_other_orders
    patch.setattr(tuning, "candidate_configs", lambda *given: candidates(*given) and tuning.smoke_configs(given[0])[:1])
    patch.setattr(tuning, "with_other_orders", lambda config: orders(config)[:1])
    patch.setattr(gpu_tests, "ROOT", out)
    for name, passes in TESTS.items():
        (out / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (out / "tests" / name).write_text(f"def test_it():\n    assert {passes}\n")
    done = subprocess.CompletedProcess
    patch.setattr(subprocess, "run", lambda command, **_: done(command, suite.main([*command[3:]])))


def defined() -> Iterator[tuple[str, str]]:
    """The file and the name of each function of benchmarks/gpu, except those inside of functions."""
    for path in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text())
        for owner in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
            prefix = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
            yield from ((str(path), prefix + one.name) for one in owner.body if isinstance(one, ast.FunctionDef))


def run_all(out: Path) -> None:
    """Prints the functions of benchmarks/gpu that did not run."""
    patch, ran = pytest.MonkeyPatch(), set[tuple[str, str]]()
    for change in (interpreter.add_tma_reductions, interpreter.compute_fp8, interpreter.call_directly):
        change(patch)
    smaller(patch, out)
    sys.settrace(lambda frame, *_: ran.add((frame.f_code.co_filename, frame.f_code.co_qualname)))
    assert suite.main(["--out", str(out), "--training-steps", "2"]) == 1, "a test fails"
    assert tune.main(["--out", str(out / "tuned.json"), "--shapes", "8,16,16,2,1"]) == 0
    sys.settrace(None)
    print("did not run:", *sorted(f"{Path(file).stem}.{name}" for file, name in {*defined()} - ran))
