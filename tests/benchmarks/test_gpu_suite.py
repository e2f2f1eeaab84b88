"""Run the GPU suite end to end in smoke mode: CPU, tiny shapes, Triton's interpreter."""

import json
import os

import pytest
import torch

from benchmarks import tune
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.context import Context
from benchmarks.gpu.gpu_tests import ROOT, problem
from benchmarks.gpu.overlap import MIN_SECONDS_PER_RUN
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
    "triton", "grouped_mm", "liger",
    "custom_experts:doubled", "custom_experts:fails_at_once", "custom_experts:fails_later",
)  # fmt: skip


interpreted = pytest.mark.skipif(DEVICE == "cuda", reason="kernels have been imported for the compiler")


@interpreted
@pytest.mark.long
@pytest.mark.timeout(600)
def test_all_sections_write_results_and_wrong_implementations_are_not_timed(tmp_path, monkeypatch):
    (tmp_path / "custom_experts.py").write_text(CUSTOM)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the suite collects tests/gpu: starts faster
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    arguments = ["--out", str(tmp_path / "out"), "--smoke", "--contestants", *IMPLEMENTATIONS]
    assert gpu.main(arguments) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["sections"].keys() == gpu.SECTIONS.keys()
    assert {section["status"] for section in results["sections"].values()} == {"done"}
    assert {row["section"] for row in results["rows"]} == {*gpu.SECTIONS}
    assert "tests collected" in (tmp_path / "out" / "tests.log").read_text()  # smoke mode does not run them
    files = {"results.json", "results.md", "tests.log", "sequential.json.gz", "overlapped.json.gz"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files
    found = {(row["name"], row["phase"]): row for row in results["rows"] if row["section"] == "experts"}
    assert found["triton", "forward"]["unit"] == "TFLOP/s" and found["triton", "forward"]["share"] > 0
    assert found["triton", "saved for backward, against 2D + 4KF"]["share"] == 1
    notes = {row["name"].partition(":")[2]: (row["status"], row["reason"]) for row in found.values() if "reason" in row}
    assert notes["doubled"][0] == "wrong" and "gate_up" in notes["doubled"][1] and "down" not in notes["doubled"][1]
    assert notes["fails_at_once"] == ("failed", "RuntimeError: no such tile")
    assert notes["fails_later"] == ("failed", "RuntimeError: out of patience")
    assert not any(name.startswith("custom") and phase == "forward" for name, phase in found)
    assert "| custom_experts:doubled |  | wrong: " in (tmp_path / "out" / "results.md").read_text()


@interpreted
def test_products_in_fp8_are_timed_if_they_are_right(tmp_path, monkeypatch):
    from benchmarks.gpu import fp8, tuned_gemms

    context = Context(torch.device("cpu"), smoke=True, out=tmp_path)
    monkeypatch.setattr(fp8, "SMOKE_SHAPES", fp8.SMOKE_SHAPES[:1])
    fp8.run(context)
    units = {row["name"]: row["unit"] for row in context.results["rows"]}
    products = dict.fromkeys(("up, with SwiGLU", "down", "up in FP8", "down in FP8"), "TFLOP/s")
    assert units == {**products, "round x": "GB/s"}
    right = tuned_gemms.fp8_rows_times_weights
    monkeypatch.setattr(tuned_gemms, "fp8_rows_times_weights", lambda *given: 1.1 * right(*given))
    context.results["rows"].clear()
    fp8.run(context)
    wrong = {row["name"] for row in context.results["rows"] if row["status"] == "wrong"}
    assert wrong == {"up in FP8", "down in FP8"}


@interpreted
def test_sections_are_skipped_when_time_runs_out(tmp_path, capsys):
    arguments = ["--out", str(tmp_path / "out"), "--smoke", "--only", "permute", "routing", "--minutes", "0.001"]
    assert gpu.main(arguments) == 0
    assert "skipped: --minutes 0.001 was used up" in capsys.readouterr().out
    sections = json.loads((tmp_path / "out" / "results.json").read_text())["sections"]
    assert [section["status"] for section in sections.values()] == ["skipped", "skipped"]


@pytest.mark.parametrize("arguments,message", [
    (["--contestants", "lieger"], "unknown implementation 'lieger'"),
    (["--minutes", "-1"], "--minutes must be a positive number: got -1"),
    (["--training-steps", "0"], "--training-steps must be at least 1: got 0"),
])  # fmt: skip
def test_invalid_options_print_one_line_and_exit_with_2(tmp_path, capsys, arguments, message):
    assert gpu.main(["--out", str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"benchmarks.gpu: error: {message}")
    assert error.count("\n") == 1


def test_the_plan_runs_every_section_in_commands_of_less_than_ten_minutes(capsys):
    assert gpu.main(["--plan"]) == 0
    plan = capsys.readouterr().out
    assert plan in (ROOT / "docs" / "benchmarks.md").read_text()
    options = [gpu.parse_arguments(line.split()[3:]) for line in plan.splitlines() if " benchmarks.gpu " in line]
    assert {name for one in options for name in one.only} == {*gpu.SECTIONS}
    assert all(60 * one.minutes + gpu.GRACE < 600 for one in options)
    tune.shapes_of(tune.parse(plan.splitlines()[3].split()[3:]))
    overlap = gpu.SECTIONS["overlap"][1] - gpu.SECTIONS["transfers"][1]  # if the others use all of their time
    assert overlap * 60 * gpu.parse_arguments([]).minutes > 2 * MIN_SECONDS_PER_RUN


# ---- What it concludes: from pytest's exit code and last line, and its own exit code ----


@pytest.mark.parametrize("code,last,fault", [
    (0, "12 passed, 1 skipped in 20.10s", ""), (5, "no tests ran in 0.01s", ""),
    (1, "1 failed, 11 passed in 9.99s", "1 failed, 11 passed in 9.99s"), (-11, "", "pytest exited with code -11"),
    (None, "", "stopped, because the time was up"),
])  # fmt: skip
def test_problem_that_pytest_reports(code, last, fault):
    assert problem(code, f"......\n{last}\n\n" if last else "") == fault


@pytest.mark.parametrize("status,rows,code", [
    ("done", [], 0), ("skipped", [], 0), ("failed", [], 1),
    ("done", [("experts", "liger", "wrong")], 0), ("done", [("experts", "triton", "wrong")], 1),
])  # fmt: skip
def test_exit_code_is_1_if_a_section_or_our_operators_failed(status, rows, code):
    found = [dict(zip(("section", "name", "status"), row, strict=True)) for row in rows]
    assert gpu.exit_code({"sections": {"experts": {"status": status}}, "rows": found}) == code
