"""A run whose disk is full at a random moment: a small file system in memory, which needs root."""

import contextlib
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from moe_dualpipe.checkpoint import find_checkpoint, list_checkpoints
from tests.support.killed_runs import Processes
from tests.support.runs import change

from .attack import Attack, UnableError
from .failing_runs import SETUPS, no_damage, resumed, run_is_done, small_run

CHECKPOINT_KB = 1000  # about one checkpoint of the small run
LARGE_KB = 64 * CHECKPOINT_KB


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """A file system of this size at `folder`."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        raise UnableError("needs root, to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def run_on(disk: Path, setup: str, rng: random.Random):
    return small_run(disk, setup, save_every=rng.choice([1, 2, 5]), save_async=rng.random() < 0.5)


def check_checkpoints(disk: Path) -> None:
    """Every checkpoint with a final name is complete."""
    for checkpoint in list_checkpoints(disk / "checkpoints"):
        find_checkpoint(str(checkpoint), no_damage)


def too_small(rng: random.Random, folder: Path) -> None:
    """The disk has room for some checkpoints. The last one decides the exit code."""
    setup = rng.choice([*SETUPS])
    with small_disk(folder / "run", rng.randrange(8, 12 * CHECKPOINT_KB)) as disk:
        config = run_on(disk, setup, rng)
        with Processes(2, config) as run:
            codes, output = run.exit_codes(0, 1), run.output(0) + run.output(1)
        assert codes in ([0, 0], [1, 1]), (codes, output)
        assert "Traceback" not in output, output
        assert (codes == [0, 0]) == run_is_done(config), (codes, output)
        check_checkpoints(disk)
        subprocess.run(["mount", "-o", f"remount,size={LARGE_KB}k", str(disk)], check=True)
        if not run_is_done(config):
            config = resumed(config) if (disk / "checkpoints").exists() else config
            with Processes(2, config) as run:
                assert run.exit_codes(0, 1) == [0, 0], run.output(0) + run.output(1)


def filled_for_a_while(rng: random.Random, folder: Path) -> None:
    """Another program fills the disk at a random step and frees it later. The run goes on to its last checkpoint."""
    setup = rng.choice([*SETUPS])
    with small_disk(folder / "run", LARGE_KB) as disk:
        config = change(run_on(disk, setup, rng), steps=40)
        with Processes(2, config) as run:
            run.wait_for_steps(rng.randrange(1, 6))
            with (disk / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
                while filler.write(bytes(1 << 16)):
                    pass
            time.sleep(rng.uniform(0, 0.5))
            os.remove(disk / "filler")
            codes, output = run.exit_codes(0, 1), run.output(0) + run.output(1)
        check_checkpoints(disk)
        if codes != [0, 0]:  # the disk was full until the last checkpoint
            assert codes == [1, 1] and "Traceback" not in output, (codes, output)
            assert "step-000040 could not be written" in output, output


ATTACKS = (
    Attack("full disk", "training goes on; no broken checkpoint; exit code 1 without the last one", 12, (too_small,)),
    Attack("disk full for a while", "training goes on and later checkpoints are written", 12, (filled_for_a_while,)),
)
