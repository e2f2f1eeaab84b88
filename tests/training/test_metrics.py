"""The metrics of a run, and the curves drawn from them."""

import json

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from moe_dualpipe.cli import main
from moe_dualpipe.commands.train import instruments
from moe_dualpipe.models import PRESETS
from moe_dualpipe.models.costs import train_flops_per_token
from moe_dualpipe.tools.drawing import curves
from moe_dualpipe.tools.drawing.curves import PANELS, _draw, positions, run_summary, running_mean, save_curves
from moe_dualpipe.training.config import TrainConfig
from moe_dualpipe.training.extensions.balance import load_statistics
from moe_dualpipe.training.metrics import Metrics, read_records, utilization
from moe_dualpipe.training.preflight import _peak_flops
from moe_dualpipe.training.sinks import TensorBoard
from tests.support.runs import change


def test_load_statistics_docstring_example():
    assert load_statistics(torch.tensor([[4, 0, 2, 2]])) == {"expert_load_max_over_mean": 2.0, "dead_experts": 0.25}
    assert load_statistics(torch.zeros(0, 4)) == {}
    uneven_and_even = torch.tensor([[4, 0, 2, 2], [2, 2, 2, 2]])
    assert load_statistics(uneven_and_even) == {"expert_load_max_over_mean": 2.0, "dead_experts": 0.125}


def test_metrics_are_appended_if_there_is_a_folder(tmp_path):
    for value in (1, 2):
        writer = Metrics(tmp_path / "run", first_step=value - 1)
        writer.write(step=value, loss=np.float64(0.5).item())
        writer.close()
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.5}\n'
    silent = Metrics(None)
    silent.write(step=1)
    silent.close()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


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


def recorded(folder, steps=range(1, 5), **more):
    folder.mkdir()
    records = [{"step": steps[0] - 1, "validation_loss": 5.5}]
    for step in steps:
        values = {"loss": 5 - step, "tokens": 8, "seconds": 1800, "tokens_per_s": 100.0 * step, **more}
        records.append({"step": step, **values})
    records.append({"step": steps[-1], "validation_loss": 1.25})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return records


def test_positions_are_cumulative_tokens_and_hours(tmp_path):
    records = recorded(tmp_path / "run", range(3, 6))
    assert positions(records, "step") == {2: 2, 3: 3, 4: 4, 5: 5}
    assert positions(records, "tokens") == {2: 0, 3: 8, 4: 16, 5: 24}
    assert positions(records, "hours") == {2: 0, 3: 0.5, 4: 1.0, 5: 1.5}


def test_the_running_mean_covers_the_latest_values():
    assert running_mean([1, 2, 3, 4], 0.5) == [1, 1.5, 2.5, 3.5]
    assert running_mean([4, 2], 0.01) == [4, 2]
    assert running_mean([]) == []
    values = np.random.default_rng(0).normal(size=101)
    expected = [values[max(0, i - 3) : i + 1].mean() for i in range(101)]
    assert running_mean(values.tolist()) == pytest.approx(expected)


def test_run_summary(tmp_path):
    assert (
        run_summary("a", recorded(tmp_path / "a")) == "a: step 4, loss 1.0000, validation 1.2500, 300 tokens/s (median)"
    )
    assert run_summary("b", [{"step": 0, "validation_loss": 5}]) == "b: no step recorded yet"


@pytest.mark.parametrize("along", ["step", "tokens", "hours"])
def test_plot_draws_only_recorded_quantities(tmp_path, capfd, along):
    recorded(tmp_path / "a")
    recorded(tmp_path / "b", range(3, 9), grad_norm=float("nan"), dead_experts=0.125)
    out = tmp_path / "curves.svg"
    assert main(["plot", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out), "--along", along]) == 0
    drawn = out.read_text()
    titles = ("training loss", "tokens/s", "gradient norm", "fraction of experts without a token", str(tmp_path / "b"))
    assert all(f">{title}" in drawn for title in titles)
    (mfu,) = [panel.title for panel in PANELS if panel.key == "mfu"]
    assert f">{mfu}" not in drawn
    assert drawn.count(f">{along}<") == 4
    printed = capfd.readouterr().out
    assert f"{tmp_path / 'b'}: step 8, loss -3.0000, validation 1.2500, 600 tokens/s (median)" in printed
    assert f"wrote {out}" in printed


def test_a_single_step_is_drawn_as_a_dot(tmp_path):
    for steps, marker in ((range(1, 2), "."), (range(1, 3), "None")):
        axes, records = Figure().add_subplot(), recorded(tmp_path / f"{len(steps)}", steps)
        _draw(axes, PANELS[0], records, positions(records, "step"), "C0")
        assert axes.lines[1].get_marker() == marker


def test_nan_is_not_drawn_and_not_in_the_mean(tmp_path):
    axes, records = Figure().add_subplot(), recorded(tmp_path / "a", range(1, 4))
    records[2]["loss"] = float("nan")
    _draw(axes, PANELS[0], records, positions(records, "tokens"), "C0")
    assert [np.asarray(line.get_xdata()).tolist() for line in axes.lines] == [[8, 24], [8, 24], [0, 24]]
    assert np.asarray(axes.lines[1].get_ydata()).tolist() == [4, 2]


@pytest.mark.parametrize("along", ["step", "tokens", "hours"])
def test_curves_are_drawn_at_their_positions(tmp_path, monkeypatch, along):
    records, drawn = recorded(tmp_path / "a"), []
    monkeypatch.setattr(curves, "_draw", lambda _axes, _panel, _records, where, _color: drawn.append(where))
    save_curves({"a": records}, tmp_path / "a.svg", along)
    assert drawn == [positions(records, along)] * 2


def test_plot_writes_into_the_run_by_default(tmp_path, capfd):
    recorded(tmp_path / "a")
    assert main(["plot", str(tmp_path / "a")]) == 0
    assert (tmp_path / "a" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert capfd.readouterr().out.endswith("curves.png\n")


@pytest.mark.parametrize(
    "content,problem",
    [
        (None, "is not the folder of a run: it has no metrics.jsonl"),
        ("", "nothing to plot: no step recorded in"),
        ('{"step": 1}\n', "nothing to plot: no step recorded in"),
        ('{"step": 1, "lo', "nothing to plot: no step recorded in"),
        ('{"step": 1}\n{"loss": 2}\n', "metrics.jsonl, line 2: not a record with a step: '{\"loss\": 2}'"),
        ("[1]\n", "metrics.jsonl, line 1: not a record"),
        ("garbage\n", "metrics.jsonl, line 1: not a record with a step: 'garbage'"),
        (b"\xff\xfe\n", "metrics.jsonl is not text: invalid start byte at byte 0"),
    ],
)
def test_plot_rejects_a_folder_without_valid_records(tmp_path, capfd, content, problem):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["plot", str(tmp_path)]) == 2
    error = capfd.readouterr().err
    assert problem in error
    assert error.count("\n") == 1


def test_plot_rejects_an_output_file_that_it_cannot_write(tmp_path, capfd):
    recorded(tmp_path / "a")
    assert main(["plot", str(tmp_path / "a"), "--out", str(tmp_path / "x.txt")]) == 2
    assert "cannot write 'x.txt': use one of .png, .svg, .pdf" in capfd.readouterr().err
    assert read_records(tmp_path / "a")[1]["loss"] == 4
