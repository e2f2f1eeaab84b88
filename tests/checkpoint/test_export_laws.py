"""Laws of exports: one file at a time, the same files however a run and its writers are divided, all or nothing."""

import dataclasses
import errno
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError

from moe_dualpipe.checkpoint import find_checkpoint, load_model, tensor_file
from moe_dualpipe.checkpoint.huggingface import from_pretrained, plan_checkpoint_export, save_pretrained
from moe_dualpipe.checkpoint.weights import global_weights
from moe_dualpipe.cli import main
from moe_dualpipe.models import ModelConfig
from moe_dualpipe.training.config import OptimizerConfig
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, ROOT, make_trainer, save, settings, train

DEEPSEEK = dataclasses.replace(
    MODEL, attention="mla", head_dim=12, rope_dim=4, value_dim=10, kv_rank=14, q_rank=10, router_score="sigmoid",
    router_bias=True, router_dtype="float32", mtp_layers=1, routed_scale=1.3,
)  # fmt: skip
PLAIN = dataclasses.replace(MODEL, num_shared_experts=0, num_dense_layers=0)
SMALL = {"seq_len": 16, "eval_sequences": 1}


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def export(run, out, *options):
    return main(["export", str(run), "--to", "huggingface", "--out", str(out), *options])


# ---- Memory ----

LARGE = ModelConfig(
    vocab_size=8192, hidden_size=512, num_layers=2, num_dense_layers=0, num_heads=4, num_kv_heads=4, head_dim=128,
    expert_size=1024, num_experts=16, experts_per_token=2, num_shared_experts=0,
)  # fmt: skip
LARGEST = 8192 * 512 * 4  # bytes of the embedding: 16 MiB
TOTAL = 235_000_000  # bytes of all tensors
MEASURE = """
import re, sys
from pathlib import Path
import torch
from moe_dualpipe.checkpoint.huggingface import from_pretrained, plan_checkpoint_export
from tests.checkpoint.test_export_laws import small_checkpoint

def status(key):
    return int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

what, given, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
warm = given.with_name("warm-" + what)  # imports and buffers of torch, which do not depend on the size
plan_checkpoint_export(small_checkpoint(given.with_name("small-" + what))).write(warm)
from_pretrained(warm)
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
if what == "export":
    plan = plan_checkpoint_export(given)
    plan.write(out, "40MB")
    bound = plan.peak_bytes("40MB")
else:
    model = from_pretrained(given)
    bound = sum(tensor.nbytes for tensor in model.state_dict().values())
print(status("VmHWM") - before, bound)
"""


def write_large_checkpoint(_rank, folder, config):
    trainer = make_trainer(0, settings(folder, model=config, pp=1, **SMALL))
    save(trainer, 1)


def small_checkpoint(folder):
    run_ranks(1, write_large_checkpoint, folder, PLAIN)
    return find_checkpoint(str(folder))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    run = tmp_path_factory.mktemp("large") / "run"
    run_ranks(1, write_large_checkpoint, run, LARGE)
    return find_checkpoint(str(run))


def peak(what, given, out):
    command = [sys.executable, "-c", MEASURE, what, str(given), str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return map(int, done.stdout.split()[-2:])


@pytest.mark.long
def test_an_export_needs_a_file_and_three_tensors_and_an_import_the_model_and_one(large, tmp_path):
    out = tmp_path / "out"
    used, stated = peak("export", large, out)
    total = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    largest = max(path.stat().st_size for path in out.glob("*.safetensors"))
    assert total > TOTAL and stated == pytest.approx(largest + 3 * LARGEST, rel=1e-4)
    assert used < stated
    used, model = peak("import", out, tmp_path / "other")
    assert used < model + 1.25 * LARGEST


# ---- Divisions ----


def save_start(rank, config, step):
    """Save a checkpoint of a run that has not begun: of initial weights, or of those that it resumes."""
    return save(make_trainer(rank, config), step)


@pytest.mark.parametrize("model,divisions", [
    (PLAIN, [(1, {"zero": False}), (2, {}), (4, {"pp": 2, "ep": 2}), (2, {"pp": 2, "schedule": "zbv"})]),
    (DEEPSEEK, [(1, {}), (2, {"pp": 1, "ep": 2, "zero": True}), (2, {"pp": 2})]),
], ids=["mixtral", "deepseek_v3"])  # fmt: skip
@pytest.mark.long
def test_exports_do_not_depend_on_the_division_of_the_run(tmp_path, model, divisions):
    run_ranks(2, train, settings(tmp_path / "run", model=model, steps=2, **SMALL))
    found, expected = find_checkpoint(str(tmp_path / "run")), None
    for i, (ranks, changes) in enumerate(divisions):
        config = settings(tmp_path / f"run-{i}", model=model, resume=str(found), steps=4, **SMALL, **changes)
        run_ranks(ranks, save_start, config, 2)
        assert export(tmp_path / f"run-{i}", tmp_path / f"out-{i}", "--max-shard-size", "60KB") == 0
        expected = expected or contents(tmp_path / f"out-{i}")
        assert contents(tmp_path / f"out-{i}") == expected
    weights = global_weights(load_model(found))
    again = global_weights(from_pretrained(tmp_path / "out-0"))
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[name], again[name]) for name in weights)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.quick("bfloat16")
def test_frozen_parameters_and_runs_in_bf16_are_exported(tmp_path, dtype):
    options = {"dtype": dtype, "freeze": ("*.experts.*", "embedding.weight"), "optim": OptimizerConfig(warmup_steps=0)}
    run_ranks(2, train, settings(tmp_path / "run", model=PLAIN, steps=2, **SMALL, **options))
    weights = global_weights(load_model(find_checkpoint(str(tmp_path / "run"))))
    for name in ("float32", "bfloat16"):
        assert export(tmp_path / "run", tmp_path / name, "--dtype", name) == 0
        exported = global_weights(from_pretrained(tmp_path / name))
        assert all(torch.equal(exported[key], tensor.to(getattr(torch, name))) for key, tensor in weights.items())


def write_together(_rank, checkpoint, out, size):
    plan_checkpoint_export(checkpoint).write(out, size)


def fail_together(rank, checkpoint, out):
    """Write on all ranks; the second one cannot read a tensor. Returns the error."""
    plan = plan_checkpoint_export(checkpoint)
    read, count = plan.read, 0

    def failing(name):
        nonlocal count
        count += 1
        if rank == 1 and count > 5:
            raise OSError(errno.EIO, "Input/output error", "tensors")
        return read(name)

    try:
        dataclasses.replace(plan, read=failing).write(out, "60KB")
    except OSError as error:
        return str(error)
    return "written"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = tmp_path_factory.mktemp("deepseek") / "run"
    run_ranks(2, train, settings(run, model=DEEPSEEK, steps=1, **SMALL))
    return run


@pytest.mark.parametrize("size", ["60KB", "5GB"])
@pytest.mark.quick("60KB")
def test_ranks_that_write_together_write_the_files_of_one(run, tmp_path, size):
    assert export(run, tmp_path / "one", "--max-shard-size", size) == 0
    run_ranks(2, write_together, find_checkpoint(str(run)), tmp_path / "two", size)
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert len([*(tmp_path / "one").glob("*.safetensors")]) == (1 if size == "5GB" else 9)


def test_an_error_of_one_rank_is_raised_on_all_and_leaves_nothing(run, tmp_path):
    errors = run_ranks(2, fail_together, find_checkpoint(str(run)), tmp_path / "out")
    assert errors == ["[Errno 5] Input/output error: 'tensors'"] * 2
    assert not [*tmp_path.iterdir()]
    run_ranks(2, write_together, find_checkpoint(str(run)), tmp_path / "out", "60KB")
    run_ranks(2, write_together_twice, find_checkpoint(str(run)), tmp_path / "out")


# ---- Numbers that a dtype does not hold ----


@pytest.mark.parametrize("dtype,value,problem", [
    ("float32", math.nan, "holds a NaN or infinity"), ("bfloat16", -math.inf, "holds a NaN or infinity"),
    ("float16", -7e4, "holds 7e+04, and torch.float16 at most 6.55e+04: choose another dtype"),
    ("bfloat16", 3.4e38, "holds 3.4e+38, and torch.bfloat16 at most 3.39e+38"),
])  # fmt: skip
def test_a_weight_that_is_not_finite_in_its_dtype_is_refused_by_name(run, tmp_path, dtype, value, problem):
    plan = plan_checkpoint_export(find_checkpoint(str(run)), getattr(torch, dtype))
    for target in [*plan.layout.targets()][::7]:
        part, first = target.parts[-1], target.shape[0] - target.parts[-1].shape[0]

        def read(name, wrong=target.name, row=first):
            tensor = plan.read(name).clone()
            if name == wrong:
                tensor.view(len(tensor), -1)[row, 0] = value
            return tensor

        if plan.shapes[part.name][0] == getattr(torch, dtype):  # the bias of a router stays in fp32
            with pytest.raises(ValueError, match=re.escape(f"{part.name} {problem}")):
                dataclasses.replace(plan, read=read).write(tmp_path / "out")
    assert not [*tmp_path.iterdir()]


# ---- Interruptions ----


def slow_export(_rank, checkpoint, out, pause):
    """Export with pauses before and after each file is written, so that a kill comes at any place."""
    save_file = tensor_file.save_file

    def slowly(*arguments):
        time.sleep(pause)
        save_file(*arguments)
        time.sleep(pause)

    with mock.patch.object(tensor_file, "save_file", slowly):
        plan_checkpoint_export(checkpoint).write(Path(out), "30KB")


KILLED = """
import sys
from pathlib import Path
from tests.checkpoint.test_export_laws import slow_export
print("ready", flush=True)
slow_export(0, Path(sys.argv[1]), Path(sys.argv[2]), 0.02)
"""


@pytest.mark.long
def test_a_killed_export_leaves_nothing_under_its_name(run, tmp_path):
    checkpoint, out, rng = find_checkpoint(str(run)), tmp_path / "out", random.Random(0)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for _ in range(3):
        command = [sys.executable, "-c", KILLED, str(checkpoint), str(out)]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        end = time.monotonic() + 30
        while not (tmp_path / ".out.unfinished").exists() and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(rng.random())
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        process.stdout.close()
        assert {path.name for path in tmp_path.iterdir()} == {".out.unfinished", ".out.lock"}
        with pytest.raises(ValueError):
            from_pretrained(out)
    assert export(run, out, "--max-shard-size", "30KB") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    plan_checkpoint_export(checkpoint).write(tmp_path / "whole", "30KB")
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("what,call", [("save_file", 1), ("save_file", 3), ("fsync", 2), ("fsync", 9), ("write", 3)])
def test_a_disk_that_fails_midway_leaves_nothing(run, tmp_path, monkeypatch, capsys, what, call):
    module = tensor_file if what == "save_file" else os
    function, count = getattr(module, what), 0

    def failing(*arguments):
        nonlocal count
        count += 1
        if count == call and what == "save_file":
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        if count == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return function(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, what, failing)
        assert export(run, tmp_path / "out", "--max-shard-size", "100KB") == 1
    error = capsys.readouterr().err
    assert "No space left on device" in error and error.count("\n") == 1
    assert not [*tmp_path.iterdir()]
    assert export(run, tmp_path / "out") == 0
    from_pretrained(tmp_path / "out")
