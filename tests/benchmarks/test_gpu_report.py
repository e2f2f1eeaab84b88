"""What the GPU suite concludes from results: outcome of the tests and exit code."""

from types import SimpleNamespace

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.gpu_tests import is_acceptable, parse_pytest_result


@pytest.mark.parametrize(
    ("code", "last", "outcome"),
    [
        (0, "12 passed, 1 skipped in 20.10s", "passed"),
        (0, "4 skipped in 1.00s", "none ran"),
        (5, "no tests ran in 0.01s", "none ran"),
        (1, "1 failed, 11 passed in 9.99s", "failed"),
        (-11, "", "failed"),
    ],
)
def test_outcome_from_pytests_exit_code_and_last_line(code, last, outcome):
    record = parse_pytest_result(code, f"......\n{last}\n\n")
    assert record["outcome"] == outcome
    assert is_acceptable(record, smoke=False) == (outcome == "passed")
    assert is_acceptable(record, smoke=True) == (outcome in ("passed", "none ran"))


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ({"tests": {"outcome": "passed"}, "experts": {}}, 0),
        ({"tests": {"outcome": "failed"}, "experts": {}}, 1),
        ({"tests": {"outcome": "none ran"}, "experts": {}}, 1),
        ({"tests": {"outcome": "passed"}, "experts": {"status": "failed", "reason": ""}}, 1),
        ({"tests": {"outcome": "passed"}, "experts": {"status": "skipped", "reason": ""}}, 0),
        ({"tests": {"outcome": "passed"}, "experts": {"shapes": [{"contestants": {"liger": {"status": "wrong"}}}]}}, 0),
        (
            {"tests": {"outcome": "passed"}, "experts": {"shapes": [{"contestants": {"triton": {"status": "wrong"}}}]}},
            1,
        ),
    ],
)
def test_exit_code_is_1_if_tests_a_section_or_our_operators_failed(results, code):
    context = SimpleNamespace(results=results, smoke=False)
    assert gpu.exit_code(context, SimpleNamespace(only=["tests", "experts"])) == code
