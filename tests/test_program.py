"""How a run was started: the name in its messages, and the command that resumes it."""

import sys
from pathlib import Path

import pytest

from moe_dualpipe.health.program import program_name, training_command

BIN = Path(sys.executable).parent


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("script,name,alone,launched", [
    ("train.py", "train.py", "python train.py", "torchrun --nproc-per-node 2 train.py"),
    (f"{BIN}/moe-dualpipe", "moe-dualpipe train", "moe-dualpipe train",
     "torchrun --nproc-per-node 2 --no-python moe-dualpipe train"),
    ("moe_dualpipe/cli.py", "moe-dualpipe train", "moe-dualpipe train",
     "torchrun --nproc-per-node 2 --no-python moe-dualpipe train"),
    ("moe_dualpipe/__main__.py", "moe-dualpipe train", "moe-dualpipe train",
     "torchrun --nproc-per-node 2 --no-python moe-dualpipe train"),
], ids=["script", "console", "module", "package"])  # fmt: skip
def test_a_run_resumes_as_it_was_started(monkeypatch, ranks, script, name, alone, launched):
    monkeypatch.setattr(sys, "argv", [script, "train"])
    monkeypatch.setenv("PATH", str(BIN))
    assert program_name() == name
    assert training_command(ranks if ranks > 1 else None) == (alone if ranks == 1 else launched).split()


def test_a_run_on_several_machines_resumes_on_as_many(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("PATH", str(BIN))
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert training_command(4) == ["torchrun", "--nnodes", "2", "--nproc-per-node", "4", "train.py"]
