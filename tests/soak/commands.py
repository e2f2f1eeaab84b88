"""Commands beside each other, under few file descriptors, and after the clock was set back."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from moe_dualpipe.checkpoint import find_checkpoint, list_checkpoints
from moe_dualpipe.training.metrics import read_records
from tests.support.killed_runs import Processes
from tests.support.runs import ROOT, SMALL, losses

from .attack import Attack
from .failing_runs import SETUPS, STEPS, check_same_result, finish, small_run


def start(*arguments: object, descriptors: int | None = None) -> subprocess.Popen[str]:
    """Start train.py. descriptors: how many files it may open."""

    def limit() -> None:
        if descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    command = [sys.executable, "train.py", "--device", "cpu", *map(str, (*SMALL, "--set", "sample.sample_tokens=0"))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*command, *map(str, arguments)], cwd=ROOT, env=environment, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=limit,
    )  # fmt: skip


def errors_of(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("train.py: error")]


def two_writers(rng: random.Random, folder: Path) -> None:
    """Start two runs in one folder, kill the first one at times, and resume what is there."""
    out, killed = folder / "run", rng.random() < 0.5
    first = start("--out", out, "--steps", 40, "--save-every", rng.choice([1, 5]))
    time.sleep(rng.uniform(0, 6))
    second = start("--out", out, "--steps", 40)
    if killed:
        time.sleep(rng.uniform(0, 6))
        first.send_signal(signal.SIGKILL)
    texts = [process.communicate(timeout=120)[1] for process in (first, second)]
    codes = [process.returncode for process in (first, second)]
    refused = [len(errors_of(text)) for text in texts]
    assert codes.count(0) + codes.count(-signal.SIGKILL) >= 1 and codes != [0, 0], (codes, texts)
    assert all(count == 1 for code, count in zip(codes, refused, strict=True) if code > 0), texts
    assert "Traceback" not in texts[0] + texts[1], texts
    if list_checkpoints(out / "checkpoints"):
        third = start("--resume", out, "--steps", 41)
        assert not third.communicate(timeout=120)[1].count("Traceback") and third.returncode == 0
        assert [*losses(read_records(out))] == [*range(1, 42)]


def set_back_clock(rng: random.Random, folder: Path) -> None:
    """Give all files of a stopped run random times, and damage the newest checkpoint at times."""
    setup = rng.choice([*SETUPS])
    config = small_run(folder / "run", setup, save_every=1)
    with Processes(2, config) as run:
        run.wait_for_steps(rng.randrange(2, STEPS - 2))
        run.kill(0, signal.SIGTERM)
        assert run.exit_codes(0, 1) == [0, 0], run.output(0) + run.output(1)
    checkpoints = list_checkpoints(folder / "run" / "checkpoints")
    damaged = rng.random() < 0.5 and len(checkpoints) > 1
    if damaged:
        victim = rng.choice([path for path in sorted(checkpoints[0].iterdir()) if path.stat().st_size])
        os.truncate(victim, rng.randrange(victim.stat().st_size))
    for path in (folder / "run").rglob("*"):
        moment = rng.uniform(0, 2e9)
        os.utime(path, (moment, moment))
    assert find_checkpoint(str(folder / "run"), lambda _: None) == checkpoints[damaged]
    if damaged:
        return
    finish(config, setup)
    check_same_result(config, setup)


def few_descriptors(rng: random.Random, folder: Path) -> None:
    """Train with a random limit of open files, with which Python itself can start."""
    process = start("--out", folder / "run", "--steps", 3, descriptors=rng.randrange(8, 40))
    _, text = process.communicate(timeout=120)
    assert "Traceback" not in text, text
    if process.returncode:
        assert "no free file descriptor" in text or "Too many open files" in text, text
    else:
        assert find_checkpoint(str(folder / "run")).name == "step-000003"


ATTACKS = (
    Attack("two runs in one folder", "one trains, the other ends with one line; the rest resumes", 10, (two_writers,)),
    Attack("clock set back", "the largest whole step counts; the resumed run is bit-equal", 10, (set_back_clock,)),
    Attack("few file descriptors", "trains and saves, or says so without a traceback", 12, (few_descriptors,)),
)
