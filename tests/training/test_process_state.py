"""What a program or a callback sets in the process changes no number of a run, or is one error."""

import contextlib
import dataclasses
import math
import os
from types import SimpleNamespace

import pytest
import torch

from moe_dualpipe import train
from moe_dualpipe.checkpoint import list_checkpoints
from tests.support.runs import SHALLOW, change, losses, settings

MODEL = dataclasses.replace(SHALLOW, router_bias=True, z_loss=0.01)  # the loads move biases
NUMBERS = ("loss", "grad_norm", "validation_loss", "expert_load_max_over_mean", "z_loss")


def numbers(config, *callbacks):
    found = []
    train(config, callbacks, [SimpleNamespace(log=found.append)], verbose=False)
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


@pytest.mark.parametrize("factor", [math.nan, -1.0, math.inf])
def test_an_invalid_factor_of_the_learning_rate(factor):
    steps = []

    def set_factor(trainer, record):
        steps.append(record["step"])
        trainer.lr_factor = factor

    with pytest.raises(ValueError, match=rf"^trainer.lr_factor must be at (least 0|most .*): got {factor}$"):
        numbers(config_of(None), set_factor)
    assert steps == [1]
