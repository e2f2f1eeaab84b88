"""How a run was started: the name in its messages, and the command that resumes it."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_dualpipe.health import program
from moe_dualpipe.health.program import launcher_options, program_name, training_command

BIN = Path(sys.executable).parent
MODULE = SimpleNamespace(name="moe_dualpipe.cli")
TYPED = ["--pp", "2", "--resume", "old", "--out", "a b"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("script,spec,name,alone,launched", [
    ("train.py", None, "train.py", "python train.py", "torchrun --nproc-per-node 2 train.py"),
    (f"{BIN}/moe-dualpipe", None, "moe-dualpipe train", "moe-dualpipe train",
     "torchrun --nproc-per-node 2 --no-python moe-dualpipe train"),
    ("moe_dualpipe/cli.py", MODULE, "moe-dualpipe train", "python -m moe_dualpipe.cli train",
     "torchrun --nproc-per-node 2 -m moe_dualpipe.cli train"),
], ids=["script", "console", "module"])  # fmt: skip
def test_a_run_starts_again_as_it_was_started(monkeypatch, ranks, script, spec, name, alone, launched):
    monkeypatch.setattr(sys, "argv", [script, "train", *TYPED])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    monkeypatch.setenv("PATH", str(BIN))
    assert program_name() == name
    assert " ".join(training_command(None if ranks == 1 else ranks)) == (alone if ranks == 1 else launched)


@pytest.mark.parametrize("words,options", [
    ("python /bin/torchrun --nnodes 2:4 --rdzv-backend=c10d --no-python moe-dualpipe train --pp 2",
     "--nnodes 2:4 --rdzv-backend=c10d"),
    ("python -m torch.distributed.run --nnodes=2 --node-rank 1 -m moe_dualpipe.cli train --nnodes 7",
     "--nnodes=2 --node-rank 1"),
    ("torchrun --standalone --nproc-per-node 2 train.py", "--standalone --nproc-per-node 2"),
    ("torchrun train.py torchrun", ""),
    ("bash job.sh torchrun-like", None), ("python train.py a b torchrun --nnodes 2 x", None), ("", None),
])  # fmt: skip
def test_the_options_of_the_launcher_are_those_before_the_script(words, options):
    assert launcher_options(words.split()) == (None if options is None else options.split())


def test_the_command_that_resumes_repeats_the_options_of_the_launcher(monkeypatch):
    typed = [
        "python",
        "/bin/torchrun",
        "--nnodes",
        "2:4",
        "--max-restarts",
        "3",
        "train.py",
        "--steps",
        "7",
        "--ep",
        "2",
    ]
    monkeypatch.setattr(program, "_parent_command", lambda: typed)
    monkeypatch.setattr(sys, "argv", ["train.py", "--ep", "2"])
    monkeypatch.setenv("PATH", str(BIN))
    assert training_command(4) == ["torchrun", "--nnodes", "2:4", "--max-restarts", "3", "train.py"]
    monkeypatch.setattr(program, "_parent_command", lambda: ["bash"])
    assert training_command(4) == ["torchrun", "--nproc-per-node", "4", "train.py"]
