"""Where metrics go besides metrics.jsonl: any sink, and W&B, of which a stand-in is imported here."""

import json
import sys

import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.integrations.trackers import ID_FILE
from moe_dualpipe.training.metrics import Metrics
from tests.support.runs import SMALL, records

FAKE_WANDB = """
import json, pathlib

class Run:
    def __init__(self, id, calls):
        self.id, self._calls = id, calls
        self._logged = 0
    def define_metric(self, *names, **options):
        self._write("define", [*names], **options)
    def log(self, record):
        self._logged += 1
        if FAIL and self._logged > 1:
            raise ConnectionError("no network")
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

    def install(fail=False):
        names = f"FAIL, CALLS = {fail}, Path({str(calls)!r})"
        text = f"from pathlib import Path\n{names}\n{FAKE_WANDB}"
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "wandb.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path / "site")
        return lambda: [json.loads(line) for line in calls.read_text().splitlines()]

    yield install
    sys.modules.pop("wandb", None)


def train(*arguments):
    main(["train", *map(str, ("--device", "cpu", *SMALL, "--sample-tokens", 0, *arguments))])


@pytest.mark.long
def test_wandb_gets_the_records_of_a_run_and_of_its_continuation(tmp_path, wandb):
    calls, run = wandb(), tmp_path / "run"
    train("--steps", 2, "--out", run, "--wandb", "my project", "--lr", 0.001)
    train("--steps", 3, "--resume", run, "--wandb", "my project")
    starts = [options for kind, options in (c for c in calls() if c[0] == "init")]
    assert [(o["project"], o["name"], o["dir"], o["id"], o["resume"]) for o in starts] == [
        ("my project", "run", str(run), id_, "allow") for id_ in (None, "abc123")
    ]
    assert starts[0]["config"]["optim"]["lr"] == 0.001 and starts[0]["config"]["steps"] == 2
    assert (run / ID_FILE).read_text() == "abc123\n"
    assert ["define", ["*"], {"step_metric": "step"}] in calls()
    assert [call[1] for call in calls() if call[0] == "log"] == records(run)
    assert [call for call in calls() if call[0] == "finish"] == [["finish", {"exit_code": 0}]] * 2


def test_a_run_continues_when_wandb_fails_and_says_so_once(tmp_path, wandb, capfd):
    calls = wandb(fail=True)
    train("--steps", 3, "--out", tmp_path / "run", "--wandb", "p")
    assert len(records(tmp_path / "run")) == 5 and len([c for c in calls() if c[0] == "log"]) == 1
    warnings = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == 1 and warnings[0].startswith("train.py: warning: WandbRun cannot log: ")
    problem = "wandb.py:15 in Run.log: ConnectionError: no network; the run continues, and does not repeat this warning"
    assert warnings[0].endswith(problem)


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
    assert "test_sinks.py" in warning and "in Broken.log: KeyError: raise KeyError; the run continues" in warning
