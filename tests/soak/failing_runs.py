"""Runs of two ranks in which a process is killed, frozen or asked to stop at a random moment."""

import functools
import json
import os
import random
import re
import shutil
import signal
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from moe_dualpipe.checkpoint import TensorFolder, find_checkpoint, load_checkpoint, read_manifest
from moe_dualpipe.health.signals import STOP_SIGNALS
from moe_dualpipe.training.config import TrainConfig
from moe_dualpipe.training.extensions import Update
from moe_dualpipe.training.step import Trainer
from tests.support.killed_runs import Processes, newest
from tests.support.runs import change, losses, records, settings

from .attack import Attack

STEPS = 12
SETUPS = {  # the options of a run, by name
    "DualPipe": {"pp": 2},
    "data parallel": {"pp": 1},
    "expert parallel": {"pp": 1, "ep": 2},
}


def small_run(out: Path, setup: str, **changes) -> TrainConfig:
    return settings(out, steps=STEPS, seq_len=16, eval_sequences=1, keep=None, timeout=20.0, **SETUPS[setup], **changes)


@functools.cache
def uninterrupted(setup: str) -> tuple[dict[int, float], dict[str, torch.Tensor]]:
    """Losses and the last checkpoint of a run that nobody disturbs."""
    folder = Path(tempfile.mkdtemp())
    try:
        config = small_run(folder / "whole", setup)
        with Processes(2, config) as run:
            assert run.exit_codes(0, 1) == [0, 0], run.output(0) + run.output(1)
        return losses(records(config.checkpoint.out)), tensors_of(newest(config.checkpoint.out))
    finally:
        shutil.rmtree(folder)


def tensors_of(checkpoint: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    saved = TensorFolder(Path(checkpoint), read_manifest(Path(checkpoint))).entries
    tensors = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in saved.items()}
    load_checkpoint(Path(checkpoint), tensors)
    return tensors


def check_same_result(config: TrainConfig, setup: str) -> None:
    """The finished run has the same losses and the same last checkpoint, bit for bit, as an uninterrupted one."""
    whole_losses, whole_tensors = uninterrupted(setup)
    assert losses(records(config.checkpoint.out)) == whole_losses
    tensors = tensors_of(newest(config.checkpoint.out))
    assert tensors.keys() == whole_tensors.keys()
    differing = [name for name, tensor in tensors.items() if not torch.equal(tensor, whole_tensors[name])]
    assert not differing, f"differ from an uninterrupted run: {differing}"


def resumed(config: TrainConfig) -> TrainConfig:
    """The options that continue a run that ended early, with or without a checkpoint."""
    out = config.checkpoint.out
    if newest(out) is not None:
        return change(config, resume=str(find_checkpoint(out, warn=no_damage)))
    shutil.rmtree(out, ignore_errors=True)
    return config


def no_damage(message: str) -> None:
    raise AssertionError(f"a failing run left a broken checkpoint: {message}")


def check_named(run: Processes, rank: int) -> None:
    """The other rank has ended with exit code 1 and named `rank`."""
    other = 1 - rank
    assert run.exit_codes(other) == [1], run.output(other)
    assert f"rank {other} stops: rank {rank} " in run.output(other), run.output(other)


def kill(rng: random.Random, folder: Path) -> None:
    """Kill a rank up to three times: at any moment, the start and the end included."""
    setup = rng.choice([*SETUPS])
    config = small_run(folder / "run", setup, save_every=rng.choice([1, 2, 5]), save_async=rng.random() < 0.5)
    for _ in range(3):
        config = resumed(config)
        with Processes(2, config) as run:
            rank, delay = rng.randrange(2), rng.uniform(0, 3)
            time.sleep(delay)
            if run.processes[rank].is_alive():
                run.kill(rank)
                check_named_unless_done(run, rank)
        if run_is_done(config):
            break
    finish(config, setup)


def kill_in_save(rng: random.Random, folder: Path) -> None:
    """Kill a rank within milliseconds of the moment a checkpoint begins to be written."""
    setup = rng.choice([*SETUPS])
    config = small_run(folder / "run", setup, save_every=1, save_async=rng.random() < 0.5)
    step, rank, delay = rng.randrange(1, STEPS), rng.randrange(2), rng.expovariate(100)
    with Processes(2, config) as run:
        unfinished = folder / "run" / "checkpoints" / f".step-{step:06d}.unfinished"
        final = folder / "run" / "checkpoints" / f"step-{step:06d}"
        end = time.monotonic() + 60
        while not (unfinished.exists() or final.exists()):
            assert time.monotonic() < end, run.output(0)
        time.sleep(delay)
        run.kill(rank)
        check_named_unless_done(run, rank)
    finish(config, setup)


def stop(rng: random.Random, folder: Path) -> None:
    """Ask one or both ranks to stop at a random moment."""
    setup, number = rng.choice([*SETUPS]), rng.choice(STOP_SIGNALS)
    config = small_run(folder / "run", setup, save_every=rng.choice([None, 1, 3]))
    with Processes(2, config) as run:
        run.wait_for_steps(1)
        time.sleep(rng.uniform(0, 0.4))
        for rank in rng.choice([[0], [1], [0, 1]]):
            if run.processes[rank].is_alive():
                run.kill(rank, number)
        assert run.exit_codes(0, 1) == [0, 0], run.output(0) + run.output(1)
        ended = re.search(r"(stopped after step \d+, saved|validation loss [\d.]+ -> )", run.output(0))
        assert ended, run.output(0)
    finish(config, setup)


def freeze(rng: random.Random, folder: Path) -> None:
    """Freeze a rank for ever. The other one names it within a few seconds."""
    config = small_run(folder / "run", rng.choice([*SETUPS]))
    with Processes(2, config, patience=2.0) as run:
        run.wait_for_steps(rng.randrange(1, 6))
        rank = rng.randrange(2)
        time.sleep(rng.uniform(0, 0.1))
        run.kill(rank, signal.SIGSTOP)
        if run_is_done(config):
            return
        check_named(run, rank)


def flip_bit(rng: random.Random, folder: Path) -> None:
    """Flip one bit of one weight on one rank between two steps. No update and no checkpoint is made with it."""
    setup, step = rng.choice([*SETUPS]), rng.randrange(1, STEPS)
    config = small_run(folder / "run", setup, zero=rng.random() < 0.7, save_every=rng.choice([None, 1]))
    spoil = partial(flip_before, step, rng.randrange(2), rng.random(), rng.random(), rng.randrange(8))
    with Processes(2, config, sabotage=spoil) as run:
        assert run.exit_codes(0, 1) == [1, 1], run.output(0) + run.output(1)
        output = run.output(0) + run.output(1)
    (name,) = re.findall("flipped: (.*)", output)
    assert re.search(rf"ranks 0, 1 disagree in {re.escape(name)}: replicas must stay bit-equal", output), output
    saved = newest(config.checkpoint.out)
    assert saved is None or int(saved[-6:]) <= step, saved


def flip_before(flip_step: int, rank: int, which: float, where: float, bit: int, trainer: Trainer) -> None:
    """After `flip_step` steps, flip bit `bit` of a byte of a replicated parameter. which, where: from 0 to 1."""
    do_step = trainer.step

    def spoiled(step: int) -> Update:
        if step == flip_step and trainer.layout.rank == rank:
            trainer.optimizer.wait()  # otherwise, the owner's weights may overwrite it
            sets = [replicas for replicas in trainer.replicas if replicas.group is not None]
            parameters = sorted((name, p) for replicas in sets for name, p in replicas.parameters.items())
            name, parameter = parameters[int(which * len(parameters))]
            data = parameter.detach().view(-1).view(torch.uint8)
            data[int(where * len(data))] ^= 1 << bit
            os.write(2, f"flipped: {name}\n".encode())
        return do_step(step)

    trainer.step = spoiled


def check_named_unless_done(run: Processes, rank: int) -> None:
    """After a kill: the other rank names it, unless the killed rank had done all its work."""
    other = 1 - rank
    codes = run.exit_codes(0, 1)
    if codes[other] == 0:
        assert run_is_done(run.config), run.output(other)
        return
    assert codes[other] == 1, f"exit code {codes[other]}\n{run.output(other)}"
    named = (f"rank {other} stops: rank {rank} ", f"rank {other} stops: it did not join the other ranks")
    assert any(text in run.output(other) for text in named), run.output(other)


def run_is_done(config: TrainConfig) -> bool:
    checkpoint = newest(config.checkpoint.out)
    return checkpoint is not None and checkpoint.endswith(f"{STEPS:06d}")


def finish(config: TrainConfig, setup: str) -> None:
    """Do the rest of the run, then compare it with an uninterrupted one."""
    if not run_is_done(config):
        config = resumed(config)
        with Processes(2, config) as run:
            assert run.exit_codes(0, 1) == [0, 0], run.output(0) + run.output(1)
    repair_records(config)
    check_same_result(config, setup)


def repair_records(config: TrainConfig) -> None:
    """A killed process may leave part of a line at the end of the metrics."""
    path = Path(config.checkpoint.out, "metrics.jsonl")
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("}\n")]
    path.write_text("".join(json.dumps(json.loads(line)) + "\n" for line in lines))


ATTACKS = (
    Attack("killed rank", "the other rank names it; the resumed run is bit-equal", 20, (kill,)),
    Attack("killed during a save", "no broken checkpoint counts; the resumed run is bit-equal", 20, (kill_in_save,)),
    Attack("signal", "a checkpoint and exit code 0; the resumed run is bit-equal", 20, (stop,)),
    Attack("frozen rank", "the other rank names it and ends", 8, (freeze,)),
    Attack("flipped bit of a replica", "named before the next update; no checkpoint is made of it", 20, (flip_bit,)),
)
