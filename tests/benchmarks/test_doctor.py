"""Real runs with faults: the profiler names each from the recordings alone, and finds none in a healthy run."""

import pytest

from benchmarks.doctor.__main__ import PAIRS, diagnosed
from benchmarks.doctor.faults import FAULTS, SLOW, WAIT, Run


def verdicts_of(faults, folder):
    run, path = Run(faults), folder / "run.json"
    run.record(folder / "warm-up.json")
    run.record(path)
    return diagnosed([path])[1]


@pytest.mark.long
def test_a_healthy_run_has_no_verdict(tmp_path):
    assert verdicts_of([], tmp_path) == []


@pytest.mark.parametrize("faults", [
    pytest.param(faults, marks=[] if faults == (WAIT, SLOW) else pytest.mark.long)
    for faults in [*((fault,) for fault in FAULTS), *PAIRS]
], ids=" and ".join)  # fmt: skip
def test_faults_are_named(faults, tmp_path):
    assert {verdict.kind for verdict in verdicts_of(faults, tmp_path)} >= {FAULTS[fault] for fault in faults}
