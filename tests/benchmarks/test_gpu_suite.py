"""Run the GPU suite end to end in smoke mode: CPU, tiny shapes, Triton's interpreter."""

import json
import os
from types import SimpleNamespace

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.gpu_tests import is_acceptable, parse_pytest_result
from tests.support.kernels import DEVICE

CUSTOM = '''
import dataclasses

from benchmarks.gpu.implementations import build_grouped_mm


def doubled(problem):
    """Correct except for the gradient of one expert, which a loss curve would not show."""
    correct = build_grouped_mm(problem)

    def double_the_last(gate_up):
        gate_up[-1] *= 2
        return gate_up

    return dataclasses.replace(correct, to_problem_layout={"gate_up": double_the_last})


def fails_at_once(problem):
    raise RuntimeError("no such tile\\nsecond line")


def fails_later(problem):
    """Fails only while it is timed."""
    correct, calls = build_grouped_mm(problem), []

    def forward():
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("out of patience")
        return correct.forward()

    return dataclasses.replace(correct, forward=forward)
'''
IMPLEMENTATIONS = (
    "triton", "grouped_mm", "liger", "scattermoe", "sonicmoe",
    "custom_experts:doubled", "custom_experts:fails_at_once", "custom_experts:fails_later",
)  # fmt: skip


interpreted = pytest.mark.skipif(DEVICE == "cuda", reason="kernels have been imported for the compiler")


@interpreted
@pytest.mark.long
def test_all_sections_write_results_and_wrong_implementations_are_not_timed(tmp_path, monkeypatch):
    (tmp_path / "custom_experts.py").write_text(CUSTOM)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the suite collects tests/gpu: starts faster
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    arguments = ["--out", str(tmp_path / "out"), "--smoke", "--contestants", *IMPLEMENTATIONS]
    assert gpu.main(arguments) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {
        "about",
        "ceilings",
        "tests",
        "experts",
        "permute",
        "fp8",
        "routing",
        "transfers",
        "overlap",
    } <= results.keys()
    assert results["ceilings"]["dense"]["unit"] == "TFLOP/s"
    assert all("reason" not in record for record in results.values() if isinstance(record, dict))
    assert "tests collected" in results["tests"]["summary"]  # smoke mode collects the tests without running them
    (entry,) = results["experts"]["shapes"]
    wrong, early, late = (
        entry["contestants"][f"custom_experts:{n}"] for n in ("doubled", "fails_at_once", "fails_later")
    )
    assert wrong["status"] == "wrong" and "gate_up" in wrong["reason"]
    assert wrong["errors"]["gate_up"] > 0.1 > wrong["errors"]["down"]
    assert "WRONG" in (tmp_path / "out" / "results.md").read_text()
    assert (early["status"], early["reason"]) == ("failed", "RuntimeError: no such tile")
    assert (late["status"], late["reason"]) == ("failed", "RuntimeError: out of patience")
    assert not any("forward" in outcome for outcome in (wrong, late))


@interpreted
def test_products_in_fp8_are_timed_if_they_are_right(tmp_path, monkeypatch):
    assert gpu.main(["--out", str(tmp_path / "out"), "--smoke", "--only", "fp8"]) == 0
    (entry,) = json.loads((tmp_path / "out" / "results.json").read_text())["fp8"]["shapes"]
    units = {name: rate["unit"] for name, rate in entry["rates"].items() if rate["status"] == "timed"}
    products = dict.fromkeys(("up, with SwiGLU", "down", "up in FP8", "down in FP8"), "TFLOP/s")
    assert units == {**products, "round x": "GB/s"}
    assert "| down in FP8 |" in (tmp_path / "out" / "results.md").read_text()
    from benchmarks.gpu import tuned_gemms

    right = tuned_gemms.fp8_rows_times_weights
    monkeypatch.setattr(tuned_gemms, "fp8_rows_times_weights", lambda *given: 1.1 * right(*given))
    assert gpu.main(["--out", str(tmp_path / "wrong"), "--smoke", "--only", "fp8"]) == 0
    (entry,) = json.loads((tmp_path / "wrong" / "results.json").read_text())["fp8"]["shapes"]
    assert {name for name, rate in entry["rates"].items() if rate["status"] == "wrong"} == {"up in FP8", "down in FP8"}


@interpreted
def test_sections_are_skipped_when_time_runs_out(tmp_path, capsys):
    arguments = ["--out", str(tmp_path / "out"), "--smoke", "--only", "permute", "routing", "--minutes", "0.001"]
    assert gpu.main(arguments) == 0
    assert "skipped, --minutes 0.001 was used up" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "results.json").read_text())["routing"]["status"] == "skipped"


@pytest.mark.parametrize("arguments,problem", [
    (["--contestants", "lieger"], "unknown implementation 'lieger'"),
    (["--minutes", "-1"], "--minutes must be a positive number: got -1"),
    (["--training-seconds", "nan"], "--training-seconds must be a positive number: got nan"),
    (["--tuning-shapes", "-3"], "--tuning-shapes must be at least 0: got -3"),
])  # fmt: skip
def test_invalid_options_print_one_line_and_exit_with_2(tmp_path, capsys, arguments, problem):
    assert gpu.main(["--out", str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"benchmarks.gpu: error: {problem}")
    assert error.count("\n") == 1


# ---- What it concludes: outcome of the tests and exit code ----


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
