"""Made-up jobs with one known fault each: it is named, with its true gain, and little is left unexplained."""

import pytest

from moe_dualpipe.tools.profiler.account import LOST
from moe_dualpipe.tools.profiler.doctor.verdict import CAUSES
from moe_dualpipe.tools.profiler.reports.verdicts import HEALTHY as NOTHING_LEFT
from moe_dualpipe.tools.profiler.reports.verdicts import verdicts_text
from tests.support.diagnosed import analyzed, outcome, verdicts_of
from tests.support.faults import FAULTS
from tests.support.faults.jobs import HEALTHY, decode
from tests.support.faults.switches import STRENGTHS

BESIDE = {
    "late host": {"imbalance"}, "item on one rank": {"imbalance"}, "many small updates": {"short-kernels"},
    "token by token": {"short-kernels"}, "no graphs": {"short-kernels"},
}  # fmt: skip
"""What is also true of these jobs."""
TITLES = {"moving imbalance": "imbalance/moving", "one chunk": "nothing-to-overlap/experts"}
LEFT = 0.02
"""The largest share of a window that may stay unexplained."""


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_true_gain(name, strength, tmp_path):
    fault = FAULTS[name]
    job = fault.healthy()
    found = outcome(fault, fault.apply(job, strength), fault.mended(job, strength) if fault.mended else job, tmp_path)
    assert fault.kind in found.kinds and {*found.kinds} <= {fault.kind, *BESIDE.get(name, ())}
    assert found.verdict is not None and found.verdict.share > 0.005
    assert found.verdict.title == CAUSES[TITLES.get(name, fault.kind)][0]
    assert found.close() if fault.mended else found.predicted_us is None, (found.predicted_us, found.true_us)
    assert found.unexplained < LEFT


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_healthy_job_has_no_verdict(name, seed, tmp_path):
    """Between the short kernels of a decode, a device takes time."""
    files = analyzed(HEALTHY[name](seed=seed, jitter=0.02 + 0.03 * seed), tmp_path)
    expected = ["short-kernels"] * (HEALTHY[name] is decode)
    for device in files.devices:
        analysis = device.analysis
        assert [verdict.kind for verdict in analysis.verdicts] == expected
        lost = sum(entry.us for entry in analysis.account if entry.kind in LOST)
        says_nothing = verdicts_text(analysis) == NOTHING_LEFT
        assert says_nothing == (lost < 0.01 * analysis.window_us)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_jobs_of_many_seeds(name, seed, tmp_path):
    found = verdicts_of(HEALTHY[name](seed=seed, jitter=0.05), tmp_path)
    assert {verdict.kind for _, verdict in found} == ({"short-kernels"} if HEALTHY[name] is decode else set())
