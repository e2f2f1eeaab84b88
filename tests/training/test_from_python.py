"""Training from Python, and whatever its program does, gives the bits of train.py in one process."""

import contextlib
import dataclasses
import math
import os
import re
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moe_dualpipe import train
from moe_dualpipe.checkpoint import list_checkpoints
from moe_dualpipe.commands.train import main
from moe_dualpipe.training import (
    OptimizerConfig,
    TrainConfig,
)
from moe_dualpipe.training.options import parse_arguments
from tests.support.ranks import run_ranks
from tests.support.runs import (
    ROOT,
    SHALLOW,
    SMALL,
    TEXT,
    change,
    equal_tensors,
    losses,
    records,
    settings,
    train_in_memory,
    weights_of,
)

CPU = ("--device", "cpu", "--steps", "3", *map(str, SMALL))
OWN_LOOP = ROOT / "examples" / "own_loop.py"


def run_own_loop():
    """Run the example, on this text and with few steps. Returns its globals."""
    variables = {"__name__": "__main__", "SHALLOW": SHALLOW}
    text = OWN_LOOP.read_text().replace('preset("tiny")', "SHALLOW")
    for left, right in (("STEPS, SEQ_LEN, SIZE, MICRO_BATCHES", "2, 32, 1, 4"), ("SOURCE", repr(TEXT))):
        text, replaced = re.subn(rf"^{left} = .*$", f"{left} = {right}", text, flags=re.MULTILINE)
        assert replaced == 1, left
    exec(compile(text, OWN_LOOP, "exec"), variables)
    return variables


def own_loop_config() -> TrainConfig:
    """The options of train.py that are those of examples/own_loop.py."""
    return change(settings("nowhere", steps=2, model=SHALLOW), out=None, optim=OptimizerConfig(warmup_steps=5))


def test_runs_from_python_have_the_results_of_the_command_and_write_nothing(tmp_path, monkeypatch, capfd):
    main([*CPU, "--out", str(tmp_path / "run")])
    expected = records(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    capfd.readouterr()
    for _ in range(2):  # in one process
        found, trainer = train_in_memory(parse_arguments(CPU))
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
    assert equal_tensors(weights_of(own["pipeline"]), weights_of(with_loop))
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
    assert found == [0.5, 0.25]


def losses_of_two_runs(rank, config, port):
    """Two runs, one after the other, in a process that torchrun has started with the store at `port`."""
    dist.barrier()  # in torch 2.15, a rank that leaves while another one still connects makes it fail
    dist.destroy_process_group()
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    return [losses(train_in_memory(config)[0]) for _ in range(2)]


def test_a_program_trains_twice_under_torchrun():
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    first, second = run_ranks(2, losses_of_two_runs, config_of(None), store.port, timeout=40)[0]
    assert first == second and len(first) == 3


# ---- What a program or a callback sets in the process changes no number of a run, or is one error ----


MODEL = dataclasses.replace(SHALLOW, router_bias=True, z_loss=0.01)  # the loads move biases
NUMBERS = ("loss", "grad_norm", "validation_loss", "expert_load_max_over_mean", "z_loss")


def numbers(config, *callbacks):
    found, _ = train_in_memory(config, *callbacks)
    return {kind: losses(found, kind) for kind in NUMBERS}


@pytest.fixture(scope="module")
def expected():
    found = numbers(config_of(None))
    assert all(0 < norm < math.inf for norm in found["grad_norm"].values()) and len(found["z_loss"]) == 3
    return found


def config_of(out):
    config = settings("", model=MODEL, schedule="1f1b", steps=3, seq_len=16)
    return change(config, out=out, save_every=out and 1)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def own_backward(trainer, _record):
    (stage,) = trainer.stages.values()
    tokens = torch.randint(256, (2, 8))
    stage.loss(stage(tokens), tokens).backward()


def gradients_off(_trainer, _record):
    torch.set_grad_enabled(False)


def inference(_trainer, _record):
    torch.inference_mode().__enter__()


def fp64(_trainer, _record):
    torch.set_default_dtype(torch.float64)


AROUND = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "fp64": lambda: default_dtype(torch.float64),
}


@pytest.mark.parametrize("around", AROUND)
def test_the_modes_of_the_caller(expected, around):
    with AROUND[around]():
        assert numbers(config_of(None)) == expected


@pytest.mark.parametrize("callback", [own_backward, gradients_off, inference, fp64])
def test_what_a_callback_leaves(expected, callback):
    with default_dtype(torch.get_default_dtype()):
        assert numbers(config_of(None), callback) == expected
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def add(value, key="mine"):
    return lambda _trainer, record: record.update({key: value})


@pytest.mark.parametrize("value", [3, 0.5, True, np.float32(0.25), np.int64(7), torch.tensor(2.0), torch.tensor(3)])
def test_callbacks_add_numbers(value):
    found, _ = train_in_memory(config_of(None), add(value))
    assert [*losses(found, "mine").values()] == [float(value)] * 3


def test_a_step_stays_a_whole_number():
    found, _ = train_in_memory(config_of(None), lambda _, record: record.update(step=float(record["step"])))
    assert {type(one["step"]) for one in found} == {int}


@pytest.mark.parametrize("callback,error,message", [
    (add("text"), TypeError, "a callback may only add numbers to the record, by name: 'mine' is str 'text'"),
    (add(torch.ones(2)), TypeError, "'mine' is Tensor"), (add(np.ones(2)), TypeError, "'mine' is ndarray"),
    (add(None), TypeError, "'mine' is NoneType None"), (add({1}), TypeError, "'mine' is set {1}"),
    (add(1.0, 3), TypeError, "3 is float 1.0"),
    (add(9, "step"), ValueError, "a callback must not change record['step']: it was 1, and is 9"),
    *((lambda _, record, key=key: record.pop(key), ValueError, f"a callback must not remove record['{key}']")
      for key in ("step", "loss")),
    *((lambda trainer, _, factor=factor: setattr(trainer, "lr_factor", factor), ValueError,
       f"trainer.lr_factor must be at {bound}: got {factor}")
      for factor, bound in ((math.nan, "least 0"), (-1.0, "least 0"), (math.inf, "most 2,147,483,647"))),
    (lambda *_: sys.exit(3), RuntimeError, "a callback must not end its process: use trainer.request_stop()"),
])  # fmt: skip
def test_what_else_a_callback_does_is_one_error(callback, error, message):
    with pytest.raises(error, match=re.escape(message)):
        train_in_memory(config_of(None), callback)


def train_with(_rank, config, batches):
    try:
        train(config, batches=batches, verbose=False)
    except ValueError as error:
        return str(error)
    return losses(records(config.checkpoint.out))


class Shuffled:
    """A DataLoader that draws a new order for each epoch, of two steps."""

    def __init__(self):
        tokens = torch.arange(16 * 17).remainder(251).view(16, 17)
        self.loader, self.epoch = torch.utils.data.DataLoader(tokens, batch_size=8, shuffle=True), iter(())

    def __call__(self, step):
        tokens = next(self.epoch, None)
        if tokens is None:
            self.epoch = iter(self.loader)
            tokens = next(self.epoch)
        return tokens[:, :-1], tokens[:, 1:]


def drawn_per_rank(step):
    tokens = torch.full((8, 17), step)
    if step == 2:
        tokens += dist.get_rank() + 1
    return tokens[:, :-1], tokens[:, 1:]


def test_batches_of_a_program_are_the_same_on_all_ranks(tmp_path):
    config = settings(tmp_path / "one", steps=5, seq_len=16, batch_size=8)
    (alone,) = run_ranks(1, train_with, config, Shuffled())
    config = change(config, out=str(tmp_path / "two"))
    assert run_ranks(2, train_with, config, Shuffled())[0] == pytest.approx(alone, rel=1e-5)
    for text in run_ranks(2, train_with, change(config, out=str(tmp_path / "three")), drawn_per_rank):
        assert text.startswith("batches(2) is not the same on all ranks: pass the sequences of the whole step on every")


def test_a_callback_in_another_working_directory(tmp_path, expected, monkeypatch):
    """Its checkpoints are written in the background, also while the callback is there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    def move(_trainer, _record):
        os.chdir(tmp_path / "elsewhere")

    assert numbers(config_of("run"), move) == expected
    assert os.getcwd() == str(tmp_path) and not [*(tmp_path / "elsewhere").iterdir()]
    assert len(list_checkpoints(tmp_path / "run" / "checkpoints")) == 3
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("validation_loss") == 2
