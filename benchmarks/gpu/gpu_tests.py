"""The GPU tests, run before anything is timed, in a process of their own: a crash there ends only them."""

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

    A smoke run only collects them: without a GPU there is nothing for them to find out.
    """
    if not (ROOT / FOLDER).is_dir():
        record.update(outcome="missing", summary=f"there is no {FOLDER}")
        return
    how = ["--collect-only"] if context.smoke else xdist_arguments()
    # Without the options of the project, which may be too quiet to say how many passed.
    command = [sys.executable, "-m", "pytest", FOLDER, "-o", "addopts=", "-q", "-p", "no:cacheprovider", *how]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=(limit := context.seconds_left()))
        record.update(parse_pytest_result(process.returncode, output))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with its own processes, which would disturb what is timed next
        output, _ = process.communicate()
        record.update(outcome="timed out", summary=f"stopped after {limit:.0f} s")
    record["output"] = output[-4000:]
    context.log(f"  {record['outcome']}: {record['summary']}")
    if record["outcome"] in ("failed", "timed out"):
        context.log(record["output"])


def xdist_arguments() -> list[str]:
    """Arguments for several processes: most of a test is compiling, on one core. Some need 15 GB of the GPU, though."""
    if importlib.util.find_spec("xdist") is None or not torch.cuda.is_available():
        return []
    by_memory = torch.cuda.get_device_properties(0).total_memory // (20 * 2**30)
    return ["-n", str(max(1, min(8, (os.cpu_count() or 1) // 2, by_memory)))]


def parse_pytest_result(code: int, output: str) -> dict[str, str]:
    """pytest's exit code and last line. Tests that were all skipped prove nothing.

    Example: judged(0, "3 passed, 1 skipped in 2.1s") has the outcome "passed"; of "4 skipped in 1s", "none ran".
    """
    last = next((line.strip("= ") for line in reversed(output.splitlines()) if line.strip()), "")
    passed = re.search(r"\b([1-9]\d*) passed", last)
    if code == 0 and passed:
        return {"outcome": "passed", "summary": last}
    if code in (0, 5):  # 5: there were none
        return {"outcome": "none ran", "summary": last}
    return {"outcome": "failed", "summary": last or f"pytest ended with code {code}"}


def is_acceptable(record: dict[str, Any], smoke: bool) -> bool:
    """Whether a run of the suite may end with code 0. On a CPU the GPU tests skip themselves."""
    return record.get("outcome") == "passed" or (smoke and record.get("outcome") in ("none ran", "missing"))
