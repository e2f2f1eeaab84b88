"""Real runs with faults: the profiler names each from the recordings alone, and finds none in a healthy run."""

import pytest

from benchmarks.doctor.__main__ import PAIRS, diagnosed, row
from benchmarks.doctor.faults import FAULTS, LATE, SLOW, WAIT, Run
from benchmarks.doctor.ranks import record_ranks, recordings
from tests.support.ranks import run_ranks


def verdicts_of(faults, folder):
    run = Run(faults)
    path = folder / "run.json"
    run.record(folder / "warm-up.json")
    run.record(path)
    return diagnosed([path])[1]


def test_a_healthy_run_has_no_verdict(tmp_path):
    assert verdicts_of([], tmp_path) == []


@pytest.mark.parametrize("fault", [
    pytest.param(fault, marks=[] if fault == WAIT else pytest.mark.long) for fault in FAULTS
])  # fmt: skip
def test_a_fault_is_named_first(fault, tmp_path):
    assert verdicts_of([fault], tmp_path)[0].kind == FAULTS[fault]


@pytest.mark.parametrize("pair", [
    pytest.param(pair, marks=[] if pair == (LATE, SLOW) else pytest.mark.long) for pair in [*PAIRS, (LATE, SLOW)]
], ids=" and ".join)  # fmt: skip
def test_both_of_two_faults_are_named(pair, tmp_path):
    assert {verdict.kind for verdict in verdicts_of(pair, tmp_path)} >= {FAULTS[fault] for fault in pair}


def _record(_rank, folder):
    record_ranks(folder, 1, warm_up=0)


def test_a_slow_rank_is_named(tmp_path):
    """A healthy rank can be late because other programs use its core, but by far less."""
    run_ranks(2, _record, tmp_path)
    slow, healthy = (diagnosed(recordings(tmp_path, fault, 0))[1] for fault in (True, False))
    assert (slow[0].kind, "rank 1" in " ".join(slow[0].evidence)) == ("imbalance", True)
    assert all((verdict.gain_us or 0) < slow[0].gain_us / 4 for verdict in healthy)


def test_the_row_of_a_fault(monkeypatch):
    """Predicted 30 and 50 ms, measured 40 and 40 ms; one healthy run of two has a wrong verdict."""

    class Found:
        def __init__(self, kind, gain_us):
            self.kind, self.gain_us = kind, gain_us

    results = {
        "a": (140e3, [Found("host-sync", 30e3)]), "b": (140e3, [Found("imbalance", 60e3), Found("host-sync", 50e3)]),
        "c": (100e3, []), "d": (100e3, [Found("few-queues", 2e3)]),
    }  # fmt: skip
    monkeypatch.setattr("benchmarks.doctor.__main__.diagnosed", lambda paths: results[paths[0]])
    assert row(WAIT, (), {True: [["a"], ["b"]], False: [["c"], ["d"]]}) == [
        WAIT, "-", "host-sync", "2 of 2", "140", "100", "40 (30 to 50)", "40 (40 to 40)", "1.00", "1 few-queues",
    ]  # fmt: skip
