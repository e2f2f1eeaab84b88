"""Known faults in made-up jobs: each must be named first, with its true gain. Healthy jobs must have no verdict."""

import pytest

from tests.support.diagnosed import outcome, verdicts_of
from tests.support.faults import FAULTS
from tests.support.faults.jobs import HEALTHY
from tests.support.faults.switches import STRENGTHS

CASES = [(name, strength) for name in FAULTS for strength in STRENGTHS]


def diagnosed(name, strength, folder, **options):
    fault = FAULTS[name]
    healthy = fault.healthy(**options)
    return outcome(fault, fault.apply(healthy, strength), healthy, folder)


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_healthy_job_has_no_verdict(name, seed, tmp_path):
    assert verdicts_of(HEALTHY[name](seed=seed, jitter=0.02 + 0.03 * seed), tmp_path) == []


@pytest.mark.parametrize(("name", "strength"), CASES)
def test_a_fault_is_named_first(name, strength, tmp_path):
    assert diagnosed(name, strength, tmp_path).kinds[:1] == [FAULTS[name].kind]


@pytest.mark.parametrize(("name", "strength"), CASES)
def test_the_predicted_gain_is_the_true_one(name, strength, tmp_path):
    found = diagnosed(name, strength, tmp_path)
    if FAULTS[name].known:
        assert found.close, (found.predicted_us, found.true_us)
    else:
        assert found.predicted_us is None


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_jobs_of_many_seeds(name, seed, tmp_path):
    assert verdicts_of(HEALTHY[name](seed=seed, jitter=0.05), tmp_path) == []
