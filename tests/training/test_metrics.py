"""The metrics of a run."""

import pytest
import torch

from moe_dualpipe.commands.train import instruments
from moe_dualpipe.models import PRESETS
from moe_dualpipe.models.costs import train_flops_per_token
from moe_dualpipe.training.config import TrainConfig
from moe_dualpipe.training.extensions.balance import load_statistics
from moe_dualpipe.training.metrics import Metrics, utilization
from moe_dualpipe.training.preflight import _peak_flops
from moe_dualpipe.training.sinks import TensorBoard
from tests.support.runs import change


def test_load_statistics_docstring_example():
    assert load_statistics(torch.tensor([[4, 0, 2, 2]])) == {"expert_load_max_over_mean": 2.0, "dead_experts": 0.25}
    assert load_statistics(torch.zeros(0, 4)) == {}
    uneven_and_even = torch.tensor([[4, 0, 2, 2], [2, 2, 2, 2]])
    assert load_statistics(uneven_and_even) == {"expert_load_max_over_mean": 2.0, "dead_experts": 0.125}


def test_tensorboard_gets_every_number_at_its_step(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for first in (0, 2):  # the second run repeats step 3, like a resumed run
        writer = Metrics(tmp_path, first_step=first, sinks=[TensorBoard(tmp_path, first)])
        for step in range(first + 1, 4):
            writer.write(step=step, loss=step + first / 10, note="words")
        writer.close()
    found = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert found.Tags()["scalars"] == ["loss"]
    assert [(event.step, round(event.value, 3)) for event in found.Scalars("loss")] == [(1, 1), (2, 2), (3, 3.2)]


def test_utilization_is_model_flops_over_the_peak_of_all_devices(monkeypatch):
    model, cpu, cuda, config = PRESETS["tiny"], torch.device("cpu"), torch.device("cuda", 0), TrainConfig()
    flops = train_flops_per_token(model, 256)
    assert utilization(model, 256, 3, 2e12) == flops / 6e12
    assert utilization(model, 256, 3, None) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    assert _peak_flops(config, cuda, torch.bfloat16, instruments()) == pytest.approx(989.4e12)
    assert _peak_flops(change(config, peak_tflops=2.0), cuda, torch.bfloat16, instruments()) == 2e12
    assert _peak_flops(config, cpu, torch.bfloat16, instruments()) is None
    assert _peak_flops(config, cuda, torch.float32, instruments()) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Unheard-of")
    assert _peak_flops(config, cuda, torch.bfloat16, instruments()) is None
