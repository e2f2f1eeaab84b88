"""Restarts by torchrun."""

import os
import random
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from moe_dualpipe.messages import refuse
from moe_dualpipe.runtime.launch import Launch
from moe_dualpipe.training import restart
from moe_dualpipe.training.options import parse_arguments
from moe_dualpipe.training.resolve import run_folder
from moe_dualpipe.training.restart import agree
from moe_dualpipe.training.rules import new_folder_rules
from tests.support.checkpoints import save_steps, write_manifest
from tests.support.ranks import run_ranks
from tests.support.runs import SMALL, losses, options, records, torchrun, train

KILLS_ITSELF = """
import os, signal
from moe_dualpipe.commands.train import main
from moe_dualpipe.training.step import Trainer

do_step = Trainer.step

def until_killed(self, step):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and step == 4 and self.layout.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return do_step(self, step)

Trainer.step = until_killed
main()
"""


def train_as_typed(rank, arguments):
    return train(rank, parse_arguments(arguments))


@pytest.mark.long
def test_torchrun_restarts_a_killed_run_which_resumes_in_its_folder(tmp_path):
    """The second attempt finds the folder of the first, without --out and with another run next to it."""
    script = tmp_path / "kills_itself.py"
    script.write_text(KILLS_ITSELF)
    (tmp_path / "runs" / "tiny" / "checkpoints").mkdir(parents=True)
    small = [*map(str, SMALL), "--steps", "7", "--save-every", "2", "--sample-tokens", "0", "--device", "cpu"]
    arguments = [*small, "--set", "checkpoint.save_async=false"]
    launch = "--standalone", "--nproc-per-node", 2, "--max-restarts", 1
    done = torchrun(*launch, script, *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "train.py: rank 0 stops: rank 1 vanished" in done.stderr
    # The rank was killed while step 4 was being saved, so that checkpoint may be complete or not.
    assert re.search(r"resumed from runs/tiny-2/checkpoints/step-00000(2, steps 3|4, steps 5) to 7", done.stdout)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"tiny", "tiny-2"}
    whole = run_ranks(2, train_as_typed, [*arguments, "--out", str(tmp_path / "whole")])[0]
    again = records(tmp_path / "runs" / "tiny-2")
    assert losses(again) == losses(whole)
    assert losses(again, "validation_loss")[7] == losses(whole, "validation_loss")[7]


def set_torchrun_environment(monkeypatch, restarts):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))


def checkpoint_in(out, step):
    folder = Path(out, "checkpoints", f"step-{step:06d}")
    write_manifest(folder, step)
    return folder


def folder_of(config):
    folder = run_folder(config.checkpoint, config.name)
    if restart.newest_checkpoint(folder) is None:
        refuse(new_folder_rules(folder, config.checkpoint))
    return folder


def test_only_a_restart_uses_the_folder_of_its_launcher(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out, new, named = "runs/tiny", options(device="cpu"), options(device="cpu", out="runs/tiny")
    Path(out).mkdir(parents=True)
    restart.mark_folder(Path(out), 0)
    assert not Path(out, "launchers").exists()  # no launcher
    set_torchrun_environment(monkeypatch, 0)
    restart.mark_folder(Path(out), 1)
    assert not Path(out, "launchers").exists()  # only one rank per machine writes it
    restart.mark_folder(Path(out), 0)
    assert len(list(Path(out, "launchers").iterdir())) == 1
    checkpoint_in(out, 3)
    assert folder_of(new) == Path("runs/tiny-2")
    with pytest.raises(ValueError, match="already holds a run"):
        folder_of(named)
    set_torchrun_environment(monkeypatch, 1)
    assert folder_of(new) == folder_of(named) == Path(out)
    assert agree(Path(out), torch.device("cpu"), Launch(0, 0, 1, 1), 10).resume == Path(out, "checkpoints/step-000003")
    monkeypatch.setattr(os, "getppid", lambda: 1)  # another launcher
    assert folder_of(new) == Path("runs/tiny-2")
    assert restart.newest_checkpoint(Path(out)) is None


def test_a_launcher_file_is_written_or_refused_before_the_run(tmp_path, monkeypatch):
    set_torchrun_environment(monkeypatch, 0)
    for method in ("mkdir", "touch"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, method, Mock(side_effect=OSError(28, "No space left on device")))
            with pytest.raises(ValueError, match=r"cannot write .*launchers/.*json: No space left on device"):
                restart.mark_folder(tmp_path, 0)


def test_a_restart_takes_the_largest_whole_step_whatever_the_clock_says(tmp_path, monkeypatch):
    rng = random.Random(0)

    def found():
        """What a restart takes, after files were touched in any order."""
        for path in rng.sample(paths := [*(tmp_path / "checkpoints").rglob("*")], len(paths)):
            os.utime(path, (rng.randrange(2 * 10**9),) * 2)
        newest = restart.newest_checkpoint(tmp_path)
        return newest and newest.name

    set_torchrun_environment(monkeypatch, 0)
    restart.mark_folder(tmp_path, 0)
    run_ranks(1, save_steps, tmp_path, [4, 6, 1_000_000])
    assert found() is None
    set_torchrun_environment(monkeypatch, 1)
    last, six = (tmp_path / "checkpoints" / f"step-{step:06d}" for step in (1_000_000, 6))
    assert found() == last.name
    next(last.glob("*.safetensors")).unlink()
    assert found() == six.name
    os.truncate(six / "run.json", 100)
    assert found() == "step-000004"
    restart.mark_folder(tmp_path, 0)  # so the third attempt uses checkpoints of the first one
    assert found() == "step-000004" and len([*(tmp_path / "launchers").iterdir()]) == 1
