"""What the GPU suite concludes from results: outcome of the tests, exit code and goals."""

from types import SimpleNamespace

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.goals import evaluate_goals
from benchmarks.gpu.gpu_tests import is_acceptable, parse_pytest_result
from benchmarks.gpu.shapes import GOAL_SHAPE

# ---- Outcome of the tests and exit code ----


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


# ---- Goals ----


def timed(value):
    part = {"median": value, "low": value - 5, "high": value + 5, "share": value / 780}
    errors = dict.fromkeys(("y", "x", "weights", "gate_up", "down"), 4e-3)
    phases = {"forward": part, "backward": part, "both": part}
    return phases | {"status": "timed", "kept_bytes_per_token": 24_800.0, "errors": errors}


SHAPE = {name: getattr(GOAL_SHAPE, name) for name in "TDFEK"} | {
    "note": "", "kept_bytes_formula": GOAL_SHAPE.saved_bytes()
}  # fmt: skip
MISSING = {"status": "not installed", "reason": "No module named 'scattermoe'"}
RESULTS = {
    "experts": {"shapes": [
        {"shape": SHAPE, "contestants": {"triton": timed(490.0), "liger": timed(330.0), "scattermoe": MISSING}}
    ]},
    "permute": {"shapes": [{"shape": SHAPE, "permute": {}, "unpermute": {"triton": {"share": 0.8}}}]},
}  # fmt: skip


def test_goals_are_met_missed_or_not_measured():
    goals = {goal.title: (goal.measured, goal.status) for goal in evaluate_goals(RESULTS)}
    assert goals.items() >= {
        "forward, TFLOP/s": ("490", "missed"), "forward + backward, TFLOP/s": ("490", "met"),
        "forward, times Liger": ("1.48x", "missed"), "forward, times ScatterMoE": ("-", "not measured"),
        "saved for backward, bytes per token (2D + 4KF and indices)": ("24,800", "met"),
        "combine, share of a copy's rate": ("80%", "missed"),
    }.items()  # fmt: skip
    assert [g.status for g in evaluate_goals({})] == ["not measured"] * 10
