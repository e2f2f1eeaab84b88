"""Run the GPU suite end to end in smoke mode: CPU, tiny shapes, Triton's interpreter."""

import json
import os

import pytest

from benchmarks.gpu import __main__ as gpu
from tests.support.interpreted import run_main

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


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "custom_experts.py").write_text(CUSTOM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the suite collects tests/gpu: starts faster
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        arguments = ["--out", str(folder / "out"), "--smoke", "--contestants", *IMPLEMENTATIONS]
        done = run_main("benchmarks.gpu.__main__", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, folder / "out"


@pytest.fixture(scope="module")
def results(smoke):
    return json.loads((smoke[1] / "results.json").read_text())


@pytest.mark.long
def test_all_sections_write_results_with_units(results):
    assert {"about", "ceilings", "tests", "experts", "permute", "routing", "transfers", "overlap"} <= results.keys()
    assert results["ceilings"]["dense"]["unit"] == "TFLOP/s"
    assert results["ceilings"]["copy"]["low"] <= results["ceilings"]["copy"]["high"]
    assert all("reason" not in record for record in results.values() if isinstance(record, dict))
    assert "torch" in results["about"]["versions"]
    assert "tests collected" in results["tests"]["summary"]  # smoke mode collects the tests without running them


@pytest.mark.long
def test_a_wrong_implementation_is_reported_with_its_error_and_not_timed(smoke, results):
    (entry,) = results["experts"]["shapes"]
    outcome = entry["contestants"]["custom_experts:doubled"]
    assert outcome["status"] == "wrong"
    assert outcome["errors"]["gate_up"] > 0.1 > outcome["errors"]["down"]
    assert "forward" not in outcome
    assert "gate_up" in outcome["reason"]
    assert "WRONG" in (smoke[1] / "results.md").read_text()


@pytest.mark.long
def test_implementations_that_fail_are_reported_and_the_others_timed(results):
    (entry,) = results["experts"]["shapes"]
    early, late = (entry["contestants"][f"custom_experts:fails_{when}"] for when in ("at_once", "later"))
    assert (early["status"], early["reason"]) == ("failed", "RuntimeError: no such tile")
    assert (late["status"], late["reason"]) == ("failed", "RuntimeError: out of patience")
    assert "forward" not in late


def test_sections_are_skipped_when_time_runs_out(tmp_path):
    arguments = ["--out", str(tmp_path / "out"), "--smoke", "--only", "permute", "routing", "--minutes", "0.001"]
    done = run_main("benchmarks.gpu.__main__", *arguments)
    assert done.returncode == 0, done.stderr
    assert "skipped, --minutes 0.001 was used up" in done.stdout
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
