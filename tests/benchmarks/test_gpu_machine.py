"""The GPU suite on a machine with an H100 and few packages, which is pretended (tests/machines/gpu_machine.py)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_RUN = {
    "implementations.build_liger",  # not installed
    "context.Context.dtype", "tuning.make_problem",  # the interpreter needs fp32
    "stand_ins.Decoder.__init__", "stand_ins.Struct.__init_subclass__",  # before the others, at an import
}  # fmt: skip


def pretend(*arguments):
    command = [sys.executable, "-m", "tests.machines.gpu_machine", *arguments]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.long
def test_the_tests_for_a_gpu_need_no_other_packages_and_their_ids_do_not_depend_on_the_device():
    """conftest.py refuses marked cases that do not exist."""
    assert "tests collected" in pretend("collect")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_function_runs_on_a_gpu_with_few_packages_and_an_interrupted_run_leaves_what_it_has(tmp_path):
    output = pretend("suite", str(tmp_path))
    assert {*output.splitlines()[-1].split()[3:]} == NOT_RUN
    results = json.loads((tmp_path / "results.json").read_text())
    failed = {name: one["reason"] for name, one in results["sections"].items() if one["status"] != "done"}
    assert failed == {"tests": "RuntimeError: failed: kernels/test_b.py"}
    entries = json.loads((tmp_path / "tuned.json").read_text())["entries"]
    assert {(entry["kernel"], entry["n"], entry["k"]) for entry in entries} == {
        ("up", 16, 16), ("down", 16, 16), ("down_backward", 16, 16), ("up_backward", 16, 32), ("wgrad", 16, 16),
        ("wgrad", 16, 32), ("fp8", 32, 16), ("fp8", 16, 16),
    }  # fmt: skip
    assert {row["status"] for row in results["rows"] if row["section"] != "tests"} <= {"measured", "unknown"}
