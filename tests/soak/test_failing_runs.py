"""Runs of two ranks in which a process is killed, frozen or asked to stop, or the disk fills up, at a random moment."""

import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from moe_dualpipe.checkpoint import find_checkpoint, list_checkpoints
from moe_dualpipe.training.config import ParallelConfig, TrainConfig
from moe_dualpipe.training.metrics import read_records
from tests.support.checkpoints import small_disk, tensors_of
from tests.support.killed_runs import Processes, newest
from tests.support.runs import ROOT, SMALL, change, losses, settings

STEPS = 12
LAYOUTS = ({"pp": 2}, {"pp": 1}, {"pp": 1, "ep": 2})  # DualPipe, data parallel, expert parallel
CHECKPOINT_KB = 1000  # about one checkpoint of the small run


def small_run(rng: random.Random, folder: Path) -> TrainConfig:
    """A run with random options."""
    changes = {**rng.choice(LAYOUTS), "save_every": rng.choice([1, 2, 5]), "save_async": rng.random() < 0.5}
    return settings(folder, steps=STEPS, seq_len=16, eval_sequences=1, keep=None, timeout=20.0, **changes)


def do(config: TrainConfig) -> None:
    """Do a run, which must succeed."""
    with Processes(2, config) as run:
        assert run.exit_codes(0, 1) == [0, 0], run.output(0) + run.output(1)


@functools.cache
def uninterrupted(layout: ParallelConfig) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """The result of a run that nobody disturbs."""
    with tempfile.TemporaryDirectory() as folder:
        config = change(small_run(random.Random(), Path(folder, "whole")), parallel=layout)
        do(config)
        return result_of(config)


def result_of(config: TrainConfig) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """Losses and the last checkpoint."""
    return losses(read_records(Path(config.checkpoint.out))), tensors_of(newest(config.checkpoint.out))


def resumed(config: TrainConfig) -> TrainConfig:
    """The options that continue a run that ended early, with or without a checkpoint."""
    out = config.checkpoint.out
    if newest(out) is not None:
        return change(config, resume=str(find_checkpoint(out, warn=no_damage)))
    shutil.rmtree(out, ignore_errors=True)  # a file system that is mounted there stays
    return config


def no_damage(message: str) -> None:
    raise AssertionError(f"a failing run left a broken checkpoint: {message}")


def is_done(config: TrainConfig) -> bool:
    checkpoint = newest(config.checkpoint.out)
    return checkpoint is not None and checkpoint.endswith(f"{STEPS:06d}")


def finish(config: TrainConfig) -> None:
    """Do the rest of the run. The result is that of an uninterrupted one, bit for bit."""
    if not is_done(config):
        do(resumed(config))
    found, expected = result_of(config), uninterrupted(config.parallel)
    assert found[0] == expected[0] and found[1].keys() == expected[1].keys()
    differing = [name for name, tensor in found[1].items() if not torch.equal(tensor, expected[1][name])]
    assert not differing, f"differ from an uninterrupted run: {differing}"


def check_named(run: Processes, rank: int) -> None:
    """The other rank has named `rank`, unless the run was done."""
    other = 1 - rank
    [code], output = run.exit_codes(other), run.output(other)
    named = (f"rank {other} stops: rank {rank} ", f"rank {other} stops: it did not join the other ranks")
    assert is_done(run.config) if code == 0 else code == 1 and any(text in output for text in named), (code, output)


@pytest.mark.parametrize("rng", range(40), indirect=True)
def test_a_killed_rank_is_named_and_the_resumed_run_is_bit_equal(rng: random.Random, tmp_path: Path) -> None:
    """Up to three times, at any moment, or soon after a checkpoint begins to be written."""
    config = small_run(rng, tmp_path / "run")
    for _ in range(3):
        rank, in_save = rng.randrange(2), rng.random() < 0.5
        with Processes(2, resumed(config)) as run:
            while in_save and not [*tmp_path.glob("run/checkpoints/.step-*")] and run.processes[0].is_alive():
                time.sleep(0.001)
            time.sleep(rng.expovariate(100) if in_save else rng.uniform(0, 3))
            if run.processes[rank].is_alive():
                run.kill(rank)
                check_named(run, rank)
        if is_done(config):
            break
    finish(config)


@pytest.mark.parametrize("rng", range(8), indirect=True)
def test_a_rank_that_is_frozen_for_ever_is_named_by_the_other(rng: random.Random, tmp_path: Path) -> None:
    config = small_run(rng, tmp_path / "run")
    with Processes(2, config, patience=2.0) as run:
        run.wait_for_steps(rng.randrange(1, 6))
        rank = rng.randrange(2)
        time.sleep(rng.uniform(0, 0.1))
        run.kill(rank, signal.SIGSTOP)
        check_named(run, rank)


@pytest.mark.parametrize("rng", range(12), indirect=True)
def test_a_disk_with_room_for_some_checkpoints(rng: random.Random, tmp_path: Path) -> None:
    """Training goes on, no checkpoint is broken, and the last one decides the exit code."""
    disk = tmp_path / "run"
    config = small_run(rng, disk)
    with small_disk(disk, rng.randrange(8, 12 * CHECKPOINT_KB)):
        with Processes(2, config) as run:
            codes, output = run.exit_codes(0, 1), run.output(0) + run.output(1)
        assert codes == ([0, 0] if is_done(config) else [1, 1]) and "Traceback" not in output, (codes, output)
        for checkpoint in list_checkpoints(disk / "checkpoints"):
            find_checkpoint(str(checkpoint), no_damage)
        subprocess.run(["mount", "-o", f"remount,size={64 * CHECKPOINT_KB}k", str(disk)], check=True)
        if not is_done(config):
            do(resumed(config))


@pytest.mark.parametrize("rng", range(12), indirect=True)
def test_too_few_file_descriptors_are_named_without_a_traceback(rng: random.Random, tmp_path: Path) -> None:
    """Random limits of open files, with which Python itself can start."""
    options = map(str, (*SMALL, "--sample-tokens", 0, "--device", "cpu", "--out", tmp_path / "run", "--steps", 3))
    ended = subprocess.run(
        ["prlimit", f"--nofile={rng.randrange(8, 40)}", sys.executable, "train.py", *options], cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "Traceback" not in ended.stderr, ended.stderr
    if ended.returncode == 0:
        assert find_checkpoint(str(tmp_path / "run")).name == "step-000003"
    else:
        assert "no free file descriptor" in ended.stderr or "Too many open files" in ended.stderr, ended.stderr
