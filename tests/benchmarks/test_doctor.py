"""Real runs with faults: the profiler names each from the recordings alone, and finds none in a healthy run."""

import pytest

from benchmarks.doctor.__main__ import PAIRS, diagnosed, row
from benchmarks.doctor.faults import FAULTS, SLOW, WAIT, Run


def verdicts_of(faults, folder):
    run, path = Run(faults), folder / "run.json"
    run.record(folder / "warm-up.json")
    run.record(path)
    return diagnosed([path])[1]


def test_a_healthy_run_has_no_verdict(tmp_path):
    assert verdicts_of([], tmp_path) == []


@pytest.mark.parametrize("faults", [
    pytest.param(faults, marks=[] if faults == (WAIT, SLOW) else pytest.mark.long)
    for faults in [*((fault,) for fault in FAULTS), *PAIRS]
], ids=" and ".join)  # fmt: skip
def test_faults_are_named(faults, tmp_path):
    assert {verdict.kind for verdict in verdicts_of(faults, tmp_path)} >= {FAULTS[fault] for fault in faults}


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
