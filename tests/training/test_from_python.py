"""Training from Python, with a loop of one's own, and with torchrun gives the same bits as train.py in one process."""

import os
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_dualpipe import preset, train
from moe_dualpipe.commands.train import main
from moe_dualpipe.training import (
    OptimizerConfig,
    TrainConfig,
)
from moe_dualpipe.training.options import parse_arguments
from tests.support.ranks import run_ranks
from tests.support.runs import ROOT, SMALL, TEXT, change, command, losses, records, settings, train_and_listen

CPU = ("--device", "cpu", "--steps", "3", *map(str, SMALL))
OWN_LOOP = ROOT / "examples" / "own_loop.py"


def run_own_loop():
    """Run the example, on this text and with few steps. Returns its globals."""
    text, variables = OWN_LOOP.read_text(), {"__name__": "__main__"}
    for left, right in (("STEPS, SEQ_LEN, SIZE, MICRO_BATCHES", "3, 32, 1, 4"), ("SOURCE", repr(TEXT))):
        text, replaced = re.subn(rf"^{left} = .*$", f"{left} = {right}", text, flags=re.MULTILINE)
        assert replaced == 1, left
    exec(compile(text, OWN_LOOP, "exec"), variables)
    return variables


def own_loop_config() -> TrainConfig:
    """The options of train.py that are those of examples/own_loop.py."""
    return change(settings("nowhere", steps=3, model=preset("tiny")), out=None, optim=OptimizerConfig(warmup_steps=5))


def weights(stages) -> dict[str, torch.Tensor]:
    return {name: tensor for stage in stages.values() for name, tensor in stage.state_dict().items()}


def assert_equal_weights(first, second):
    first, second = weights(first), weights(second)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_runs_from_python_have_the_results_of_the_command_and_write_nothing(tmp_path, monkeypatch, capfd):
    main([*CPU, "--out", str(tmp_path / "run")])
    expected = records(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    capfd.readouterr()
    for _ in range(2):  # in one process
        found = []
        trainer = train(parse_arguments(CPU), log=[SimpleNamespace(log=found.append)], verbose=False)
        assert not dist.is_initialized()
        for kind in ("loss", "grad_norm", "lr"):
            assert losses(found, kind) == losses(expected, kind)
        assert trainer.validation_loss() == losses(found, "validation_loss")[3] == expected[-1]["validation_loss"]
    assert len(trainer.sample("class ", 7)) == 7
    assert capfd.readouterr() == ("", "")
    assert os.listdir() == ["run"]


def stop_on_rank_1(trainer, record):
    record["added"] = 2.0 * record["step"]
    if trainer.layout.rank == 1 and record["step"] == 2:
        trainer.request_stop()


def use_own_group(_rank, config):
    """`train` and the own loop on two ranks, in the process group of the program."""
    group = dist.group.WORLD
    trainer = train(config, [stop_on_rank_1], verbose=False)
    assert dist.group.WORLD is group
    reached = trainer.progress.step
    assert len(trainer.sample("class ", 7)) == 7
    own: Any = run_own_loop()
    assert dist.group.WORLD is group
    with_loop = train(own_loop_config(), verbose=False)
    assert_equal_weights(own["pipeline"].stages, with_loop.stages)
    return reached, own["schedule"].name


def test_two_ranks_use_the_process_group_of_the_program_and_stop_together(tmp_path):
    config = settings(tmp_path, steps=5)
    assert run_ranks(2, use_own_group, config) == [(2, "dualpipe")] * 2
    found = records(tmp_path)
    assert losses(found, "added") == {1: 2.0, 2: 4.0}
    assert (tmp_path / "checkpoints" / "step-000002").is_dir()


def test_callbacks_change_the_learning_rate():
    def halve(trainer, _):
        trainer.lr_factor *= 0.5

    found = []
    config = change(own_loop_config(), optim=OptimizerConfig(lr=0.5, warmup_steps=0, final_lr=1.0))
    train(config, [halve, lambda _, record: found.append(record["lr"])], verbose=False)
    assert found == [0.5, 0.25, 0.125]


@pytest.mark.long
def test_torchrun_trains_and_prints_the_command_that_resumes_the_run(tmp_path):
    out = tmp_path / "run"
    done = command("--steps", 3, "--out", out, *SMALL, processes=2)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"validation loss \d\.\d+ -> \d\.\d+ nats per byte", lines[-1])
    assert "dualpipe over 2 pipeline x 1 data-parallel ranks, on cpu in float32" in lines
    assert any(
        re.fullmatch(r"  stage 1 on pipeline ranks 0 and 1: layer 1 \+ head \(\d\d% of the work\)", s) for s in lines
    )
    assert f"saved {out}/checkpoints/step-000003" in lines
    assert "    | class " in done.stdout
    assert "loss" in done.stderr
    assert "tokens/s" in done.stderr
    (resume,) = [line.removeprefix("to resume: ") for line in lines if line.startswith("to resume: ")]
    assert re.match(r"\S*torchrun --nproc-per-node 2 train.py ", resume)
    config = parse_arguments(resume.split("train.py ")[1].split())
    assert f"resumed from {out}/checkpoints/step-000003, steps 4 to 6" in run_ranks(2, train_and_listen, config)[0]
    assert list(losses(records(out))) == [1, 2, 3, 4, 5, 6]
