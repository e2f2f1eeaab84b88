"""Section "tests": run tests/gpu before anything is timed, in a separate process so that a crash ends only them."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from .context import Context

FOLDER = "tests/gpu"
ROOT = Path(__file__).parents[2]


def run(context: Context, record: dict[str, Any]) -> None:
    """Fill record: outcome ("passed", "failed", "none ran", "missing", "timed out"), summary, output.

    A smoke run only collects the tests, because they need a GPU.
    """
    if not (ROOT / FOLDER).is_dir():
        record.update(outcome="missing", summary=f"there is no {FOLDER}")
        return
    extra = ["--collect-only"] if context.smoke else xdist_arguments()
    # addopts= drops the project's options, which may hide how many tests passed.
    command = [sys.executable, "-m", "pytest", FOLDER, "-o", "addopts=", "-q", "-p", "no:cacheprovider", *extra]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=(limit := context.seconds_left()))
        record.update(parse_pytest_result(process.returncode, output))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the workers too: they would disturb later timings
        output, _ = process.communicate()
        record.update(outcome="timed out", summary=f"stopped after {limit:.0f} s")
    record["output"] = output[-4000:]
    context.log(f"  {record['outcome']}: {record['summary']}")
    if record["outcome"] in ("failed", "timed out"):
        context.log(record["output"])


def xdist_arguments() -> list[str]:
    """Return pytest-xdist options. Tests mostly compile on one core, but some need 15 GB of GPU memory per process."""
    if importlib.util.find_spec("xdist") is None or not torch.cuda.is_available():
        return []
    by_memory = torch.cuda.get_device_properties(0).total_memory // (20 * 2**30)
    return ["-n", str(max(1, min(8, (os.cpu_count() or 1) // 2, by_memory)))]


def parse_pytest_result(code: int, output: str) -> dict[str, str]:
    """Return the outcome from pytest's exit code, and its last line as the summary.

    Example: (0, "3 passed, 1 skipped in 2.1s") has the outcome "passed"; (0, "4 skipped in 1s") has "none ran".
    """
    last = next((line.strip("= ") for line in reversed(output.splitlines()) if line.strip()), "")
    passed = re.search(r"\b([1-9]\d*) passed", last)
    if code == 0 and passed:
        return {"outcome": "passed", "summary": last}
    if code in (0, 5):  # 5: pytest collected no tests
        return {"outcome": "none ran", "summary": last}
    return {"outcome": "failed", "summary": last or f"pytest exited with code {code}"}


def is_acceptable(record: dict[str, Any], smoke: bool) -> bool:
    """Return whether the suite may exit with 0. In smoke mode no GPU test can run, so "none ran" is accepted."""
    return record.get("outcome") == "passed" or (smoke and record.get("outcome") in ("none ran", "missing"))
