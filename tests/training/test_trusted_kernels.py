"""What a run does if the self-test of the Triton kernels finds a wrong result."""

import pytest
import torch

pytest.importorskip("triton")

from moe_dualpipe.kernels.self_test import SelfTest
from moe_dualpipe.models import StageOptions
from moe_dualpipe.pipeline import Numerics
from moe_dualpipe.training import ComputeConfig, TrainConfig, step
from tests.support.kernels import DEVICE


def trusted(**compute):
    numerics = Numerics(DEVICE, torch.float32, StageOptions(kernels="triton"))
    return step.trusted(TrainConfig(compute=ComputeConfig(**compute)), numerics).options.kernels


def test_a_run_falls_back_to_plain_torch_unless_triton_was_typed(monkeypatch):
    monkeypatch.setattr(SelfTest, "first_difference", lambda _: "the Triton kernels compute a wrong gradient of x")
    with pytest.warns(UserWarning, match=r"compute a wrong gradient of x: this run uses plain torch$"):
        assert trusted() == "reference"
    with pytest.raises(ValueError, match=r"use --kernels reference, or --set compute\.self_test=false"):
        trusted(kernels="triton")
    assert trusted(self_test=False) == "triton"
    monkeypatch.setattr(SelfTest, "first_difference", lambda _: None)
    assert trusted() == "triton"
