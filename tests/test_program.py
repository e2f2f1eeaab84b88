"""How a run was started: the name in its messages, and the command that resumes it."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_dualpipe.program import program_name
from moe_dualpipe.training.command_line import resume_command

BIN = Path(sys.executable).parent
MODULE = SimpleNamespace(name="moe_dualpipe.cli")
TYPED = ["--pp", "2", "--resume", "old", "--out", "a b"]
RESUMED = "--pp 2 --out 'a b' --resume runs/x --steps 9"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("script,spec,name,alone,launched", [
    ("train.py", None, "train.py", "python train.py", "torchrun --nproc-per-node 2 train.py"),
    (f"{BIN}/moe-dualpipe", None, "moe-dualpipe train", "moe-dualpipe train",
     "torchrun --nproc-per-node 2 --no-python moe-dualpipe train"),
    ("moe_dualpipe/cli.py", MODULE, "moe-dualpipe train", "python -m moe_dualpipe.cli train",
     "torchrun --nproc-per-node 2 -m moe_dualpipe.cli train"),
], ids=["script", "console", "module"])  # fmt: skip
def test_a_run_resumes_as_it_was_started(monkeypatch, ranks, script, spec, name, alone, launched):
    monkeypatch.setattr(sys, "argv", [script, "train", *TYPED])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    monkeypatch.setenv("PATH", str(BIN))
    for variable in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(variable, str(ranks))
    assert program_name() == name
    assert resume_command(TYPED, "runs/x", 9) == f"{alone if ranks == 1 else launched} {RESUMED}"
