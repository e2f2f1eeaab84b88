"""What the GPU suite concludes from results: outcome of the tests, exit code, goals, tables and figures."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import gpu_tests
from benchmarks.gpu.context import Context
from benchmarks.gpu.goals import GOALS, evaluate_goals
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
    ("body", "outcome", "summary", "seconds"),
    [
        ("assert True", "passed", "2 passed in", 60),
        ("assert n", "failed", "1 failed, 1 passed in", 60),
        ("pytest.skip('no GPU')", "none ran", "2 skipped in", 60),
        ("time.sleep(60) if n else None", "timed out", "stopped after 3 s", 3),
    ],
    ids=["passed", "failed", "none ran", "timed out"],
)
@pytest.mark.quick("failed", "none ran")
def test_outcome_of_tests_run_in_a_subprocess(tmp_path, monkeypatch, body, outcome, summary, seconds):
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q --durations=8\n")
    code = f"import time, pytest\n@pytest.mark.parametrize('n', [0, 1])\ndef test_it(n):\n    {body}\n"
    (folder / "test_it.py").write_text(code)
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # starts faster
    context = Context(
        device=torch.device("cpu"), smoke=False, out=tmp_path, implementations=(), tuning_shapes=0, training_seconds=0,
        deadline=seconds, now=lambda: 0.0,
    )  # fmt: skip
    record = {}
    gpu_tests.run(context, record)
    assert record["outcome"] == outcome
    assert record["summary"].startswith(summary)


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


# ---- Goals, tables and figures ----


def measured_results(ours=520.0, liger=330.0, share=0.9):
    def timed(value):
        part = {"median": value, "low": value - 5, "high": value + 5, "share": value / 780}
        return {
            "status": "timed", "forward": part, "backward": part, "both": part, "kept_bytes_per_token": 24_800.0,
            "errors": dict.fromkeys(("y", "x", "weights", "gate_up", "down"), 4e-3),
        }  # fmt: skip

    contestants = {
        "triton": timed(ours), "liger": timed(liger),
        "scattermoe": {"status": "not installed", "reason": "No module named 'scattermoe'"},
    }  # fmt: skip
    sizes = {name: getattr(GOAL_SHAPE, name) for name in "TDFEK"}
    shape = sizes | {"note": "", "kept_bytes_formula": GOAL_SHAPE.saved_bytes()}
    permute = {"shape": shape, "permute": {}, "unpermute": {"triton": {"share": share}}}
    return {
        "experts": {"shapes": [{"shape": shape, "contestants": contestants}]},
        "permute": {"shapes": [permute]},
    }  # fmt: skip


def test_goals_are_met_missed_or_not_measured():
    results = measured_results(ours=490.0, share=0.8)
    goals = {goal.title: (goal.measured, goal.status) for goal in evaluate_goals(results)}
    assert goals["forward, TFLOP/s"] == ("490", "missed")
    assert goals["forward + backward, TFLOP/s"] == ("490", "met")
    assert goals["forward, times Liger"] == ("1.48x", "missed")
    assert goals["forward, times ScatterMoE"] == ("-", "not measured")
    assert goals["saved for backward, bytes per token (2D + 4KF and indices)"] == ("24,800", "met")
    assert goals["combine, share of a copy's rate"] == ("80%", "missed")
    assert {g.status for g in evaluate_goals({})} == {"not measured"}
    assert len(GOALS) == 10
