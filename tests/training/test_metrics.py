"""The metrics of a run: records of steps and intervals, files of any content, and sinks, such as W&B."""

import contextlib
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from moe_dualpipe.cli import main
from moe_dualpipe.integrations.trackers import ID_FILE, TensorBoard
from moe_dualpipe.models import PRESETS, preset
from moe_dualpipe.models.costs import train_flops_per_token
from moe_dualpipe.models.load_statistics import load_statistics
from moe_dualpipe.pipeline import Numerics
from moe_dualpipe.runtime.layout import Layout
from moe_dualpipe.training.config import TrainConfig
from moe_dualpipe.training.console import Console
from moe_dualpipe.training.metrics import FIELDS, FILE, Metrics, merged, read_records, utilization
from moe_dualpipe.training.resolve import Start
from moe_dualpipe.training.step import peak_flops_of
from tests.support.checkpoints import small_disk
from tests.support.mutations import check_message, mutations
from tests.support.runs import SMALL, change, losses, records, settings, train_in_memory


def test_load_statistics_docstring_example():
    assert load_statistics(torch.tensor([[4, 0, 2, 2]])) == {
        "expert_load_max_over_mean": 2.0, "max_vio": 1.0, "dead_experts": 0.25, "starved_experts": 1,
    }  # fmt: skip
    assert load_statistics(torch.zeros(0, 4)) == {}
    uneven_and_even = torch.tensor([[4, 0, 2, 2], [2, 2, 2, 2]])
    assert load_statistics(uneven_and_even) == {
        "expert_load_max_over_mean": 2.0, "max_vio": 0.5, "dead_experts": 0.125, "starved_experts": 1,
    }  # fmt: skip


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
    assert peak_flops_of(config, Numerics(cuda, torch.bfloat16)) == pytest.approx(989.4e12)
    assert peak_flops_of(change(config, peak_tflops=2.0), Numerics(cuda, torch.bfloat16)) == 2e12
    assert peak_flops_of(config, Numerics(cpu, torch.bfloat16)) is None
    assert peak_flops_of(config, Numerics(cuda, torch.float32)) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Unheard-of")
    assert peak_flops_of(config, Numerics(cuda, torch.bfloat16)) is None


STEP = {
    "step": 3, "loss": 2.5, "grad_norm": 0.5, "lr": 1e-3, "skipped": 0, "seconds": 0.5, "tokens": 64,
    "tokens_per_s": 128.0, "mfu": 0.25, "validation_loss": 3.0,
}  # fmt: skip
BEFORE = {**STEP, "step": 2}


def test_numbers_that_are_not_finite_are_null_in_the_file_and_none_when_read(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.write(step=1, loss=float("nan"), grad_norm=float("inf"))
    metrics.close()
    line = '{"step": 1, "loss": null, "grad_norm": null}\n'
    assert (tmp_path / FILE).read_text() == line
    old = '{"step": 2, "loss": NaN, "grad_norm": -Infinity, "tokens": 1, "seconds": 1, "tokens_per_s": 1}\n'
    (tmp_path / FILE).write_text(old)
    (record,) = read_records(tmp_path)
    assert (record["loss"], record["grad_norm"]) == (None, None)
    Metrics(tmp_path, first_step=2).close()
    assert (tmp_path / FILE).read_text() == old


def test_the_fields_of_a_run_are_described():
    model = replace(preset("tiny"), num_layers=2, mtp_layers=1, sequence_loss=0.1, z_loss=0.1)
    found, _ = train_in_memory(change(settings("", steps=1, model=model, seq_len=16), out=None))
    keys = {key for record in found for key in record}
    assert keys <= {*FIELDS} and keys > {"loss", "validation_loss", "mtp_loss", "z_loss", "tokens_per_s", "lr"}


def test_every_wrong_value_is_refused_or_continued(tmp_path):
    read = 0
    for what, text in mutations(STEP):
        (tmp_path / FILE).write_text(f"{json.dumps(BEFORE)}\n{text}\n")
        try:
            records = read_records(tmp_path)
        except ValueError as error:
            check_message(error)
            assert f"{FILE}, line 2: " in str(error)
            continue
        assert len(records) == 2, what
        Metrics(tmp_path, first_step=2).close()  # a resumed run
        assert read_records(tmp_path)[0]["step"] == 2
        read += 1
    assert read > 50


def test_an_interval_has_sums_rates_the_latest_values_and_means_of_finite_values():
    steps = [
        {"step": 4, "loss": 3.0, "seconds": 1.0, "tokens": 8, "tokens_per_s": 8.0, "lr": 0.1, "dead_experts": 0.5},
        {"step": 5, "loss": math.nan, "seconds": 1.0, "tokens": 8, "tokens_per_s": 8.0, "lr": 0.2, "dead_experts": 0.0},
        {"step": 6, "loss": 1.0, "seconds": 2.0, "tokens": 8, "tokens_per_s": 4.0, "lr": 0.3, "dead_experts": 0.25},
    ]
    assert merged(steps) == {
        "step": 6, "loss": 2.0, "seconds": 4.0, "tokens": 24, "tokens_per_s": 6.0, "lr": 0.3, "dead_experts": 0.25,
    }  # fmt: skip
    assert merged(steps[:1]) is steps[0]
    assert math.isnan(merged([steps[1]] * 2)["loss"])


def test_records_end_at_multiples_of_log_every_and_at_the_end(tmp_path):
    config = settings(tmp_path, log_every=3, steps=7)
    run: Any = SimpleNamespace(config=config, layout=Layout(), folder=tmp_path, start=Start())
    with contextlib.closing(Console(run, verbose=False)) as console:
        for step in range(1, 8):
            console.step({"step": step, "loss": float(step), "tokens": 5, "tokens_per_s": 1.0, "seconds": 5.0})
    assert losses(records(tmp_path)) == {3: 2.0, 6: 5.0, 7: 7.0}
    assert losses(records(tmp_path), "tokens") == {3: 15, 6: 15, 7: 5}


FAKE_WANDB = """
import json

class Run:
    def __init__(self, id, calls):
        self.id, self._calls = id, calls
    def define_metric(self, *names, **options):
        self._write("define", [*names], **options)
    def log(self, record):
        self._write("log", record)
    def finish(self, **options):
        self._write("finish", **options)
    def _write(self, *call, **options):
        with self._calls.open("a") as file:
            file.write(json.dumps([*call, options]) + "\\n")

def init(**options):
    run = Run(options["id"] or "abc123", CALLS)
    run._write("init", **options)
    return run
"""


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """Installs a stand-in for W&B. Returns a function that reads what was called."""
    calls = tmp_path / "calls.jsonl"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "wandb.py").write_text(f"import pathlib\nCALLS = pathlib.Path({str(calls)!r})\n{FAKE_WANDB}")
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield lambda: [json.loads(line) for line in calls.read_text().splitlines()]
    sys.modules.pop("wandb", None)


def train(*arguments):
    main(["train", *map(str, ("--device", "cpu", *SMALL, "--sample-tokens", 0, *arguments))])


@pytest.mark.long
def test_wandb_gets_the_records_of_a_run_and_of_its_continuation(tmp_path, wandb):
    run = tmp_path / "run"
    train("--steps", 2, "--out", run, "--wandb", "my project", "--lr", 0.001)
    train("--steps", 3, "--resume", run, "--wandb", "my project")
    starts = [options for kind, options in (c for c in wandb() if c[0] == "init")]
    assert [(o["project"], o["name"], o["dir"], o["id"], o["resume"]) for o in starts] == [
        ("my project", "run", str(run), id_, "allow") for id_ in (None, "abc123")
    ]
    assert starts[0]["config"]["optim"]["lr"] == 0.001 and starts[0]["config"]["steps"] == 2
    assert (run / ID_FILE).read_text() == "abc123\n"
    assert ["define", ["*"], {"step_metric": "step"}] in wandb()
    assert [call[1] for call in wandb() if call[0] == "log"] == records(run)
    assert [call for call in wandb() if call[0] == "finish"] == [["finish", {"exit_code": 0}]] * 2


class Recorder:
    """A sink that changes what it gets."""

    def __init__(self):
        self.got, self.closed = [], False

    def log(self, record):
        self.got.append(dict(record))
        record.clear()

    def close(self):
        self.closed = True


class Broken:
    def log(self, record):
        raise KeyError

    def close(self):
        raise OSError("late")


def test_every_sink_gets_each_record_whatever_the_others_do(tmp_path, capfd):
    sinks = first, _, second = Recorder(), Broken(), Recorder()
    writer = Metrics(tmp_path, sinks=sinks)
    writer.write(step=1, loss=float("nan"))
    writer.write(step=2, loss=0.5)
    writer.close()
    for sink in (first, second):
        assert [record["step"] for record in sink.got] == [1, 2] and sink.got[1]["loss"] == 0.5 and sink.closed
    warning = capfd.readouterr().err
    assert warning.startswith("\ntrain.py: warning: Broken cannot log: ") and warning.count("\n") == 2
    assert "test_metrics.py" in warning and "in Broken.log: KeyError: raise KeyError; the run continues" in warning


# ---- A full disk: what can be written later is written later ----


def test_records_wait_until_there_is_space(tmp_path, capfd):
    ballast, out = tmp_path / "disk" / "ballast", tmp_path / "disk" / "run"
    with small_disk(tmp_path / "disk", 64):
        writer = Metrics(out)
        writer.write(step=1)
        with contextlib.suppress(OSError):
            ballast.write_bytes(bytes(1 << 20))
        for step in range(2, 500):
            writer.write(step=step, save_error="x" * 20)
        found = [record["step"] for record in read_records(out)]
        assert found == [*range(1, len(found) + 1)]
        assert 1 < len(found) < 499
        assert (out / "metrics.jsonl").read_text().endswith("}\n"), "part of a record was left"
        ballast.unlink()
        writer.write(step=500)
        writer.close()
        assert [record["step"] for record in read_records(out)] == [*range(1, 501)]
    problem = f"{out}/metrics.jsonl cannot be written: No space left on device; the run continues and tries again"
    assert capfd.readouterr().err == f"\ntrain.py: warning: {problem}\n"


def test_a_resumed_run_removes_repeated_records_as_soon_as_it_can(tmp_path, monkeypatch, capfd):
    path = tmp_path / "metrics.jsonl"
    old = '{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st'
    path.write_text(old)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", Mock(side_effect=OSError(28, "No space left on device")))
        writer = Metrics(tmp_path, first_step=1)
        writer.write(step=2, again=True)
        assert path.read_text() == old
        assert list(tmp_path.iterdir()) == [path]
    writer.write(step=3, again=True)
    writer.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2, "again": true}\n{"step": 3, "again": true}\n'
    assert capfd.readouterr().err.count("No space left on device") == 1
