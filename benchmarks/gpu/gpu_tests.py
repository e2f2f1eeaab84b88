"""Section "tests": run tests/gpu before anything is timed, in a separate process so that a crash ends only them."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import torch

from .context import Context

FOLDER = "tests/gpu"
ROOT = Path(__file__).parents[2]


def run(context: Context) -> None:
    """Print and store what pytest says. Raises RuntimeError unless tests passed.

    A smoke run only collects the tests, because they need a GPU.
    """
    if not (ROOT / FOLDER).is_dir():
        raise RuntimeError(f"there is no {FOLDER}")
    extra = ["--collect-only"] if context.smoke else xdist_arguments()
    # addopts= drops the project's options, which may hide how many tests passed.
    command = [sys.executable, "-m", "pytest", FOLDER, "-o", "addopts=", "-q", "-p", "no:cacheprovider", *extra]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=(limit := context.seconds_left()))
        fault = problem(process.returncode, output, context.smoke)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the workers too: they would disturb later timings
        output, _ = process.communicate()
        fault = f"stopped after {limit:.0f} s"
    (context.out / "tests.log").write_text(output)
    context.log(last_line(output))
    if fault:
        context.log(output[-4000:])
        raise RuntimeError(fault)


def xdist_arguments() -> list[str]:
    """Return pytest-xdist options. Tests mostly compile on one core, but some need 15 GB of GPU memory per process."""
    if importlib.util.find_spec("xdist") is None or not torch.cuda.is_available():
        return []
    by_memory = torch.cuda.get_device_properties(0).total_memory // (20 * 2**30)
    return ["-n", str(max(1, min(8, (os.cpu_count() or 1) // 2, by_memory)))]


def last_line(output: str) -> str:
    return next((line.strip("= ") for line in reversed(output.splitlines()) if line.strip()), "")


def problem(code: int, output: str, smoke: bool) -> str:
    """Return what is wrong, from pytest's exit code and output; "" if tests passed or, in smoke mode, were collected.

    Example: (0, "4 skipped in 1s", False) is "no test passed: 4 skipped in 1s".
    """
    last = last_line(output)
    if code not in (0, 5):  # 5: pytest collected no tests
        return last or f"pytest exited with code {code}"
    return "" if smoke or re.search(r"\b[1-9]\d* passed", last) else f"no test passed: {last}"
