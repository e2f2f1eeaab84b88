"""Section "tests": test the kernels before anything is timed: a process for each file, so that a crash ends only it."""

import os
import re
import sys
from pathlib import Path

from .context import Context
from .precompile import run_commands

ROOT = Path(__file__).parents[2]
FOLDERS = "tests/gpu", "tests/kernels"
LARGE = "test_large_offsets.py"
"""It needs up to 34 GiB of GPU memory, so it runs alone. The others mostly compile, on one core each."""


def run(context: Context) -> None:
    """Add what pytest says of each file. Raises RuntimeError if a test failed, or if none passed.

    Quick cases come first, and long ones as time permits. A smoke run only collects, because the tests need a GPU.
    """
    (context.out / "tests.log").write_text("")
    folders = [ROOT / folder for folder in FOLDERS]
    files = folders if context.smoke else [path for folder in folders for path in sorted(folder.glob("test_*.py"))]
    workers, faults, passed = max(1, min(8, (os.cpu_count() or 1) // 2)), list[str](), False
    for cases in ("not long", "long")[: 1 if context.smoke else 2]:
        for large in (False, True):
            chosen = [path for path in files if (path.name == LARGE) == large]
            commands = [pytest(path, cases, context.smoke) for path in chosen]
            found = run_commands(commands, 1 if large else workers, context.seconds_left())
            for path, (code, output) in zip(chosen, found, strict=True):
                with (context.out / "tests.log").open("a") as log:
                    log.write(f"{path}, {cases}\n{output}\n")
                fault, name = problem(code, output), f"{path.parent.name}/{path.name}"
                status = "not run" if code is None and not output else "failed" if fault else "passed"
                if code != 5:
                    context.add(name, cases, status=status, reason=last_line(output))
                if status == "failed":
                    context.log(output[-2000:])
                    faults.append(name)
                passed = passed or bool(re.search(r"\b[1-9]\d* passed", last_line(output)))
            context.save()
    if faults or not (passed or context.smoke):
        raise RuntimeError(f"failed: {', '.join(faults)}" if faults else "no test passed")


def pytest(path: Path, cases: str, smoke: bool) -> list[str]:
    # addopts= drops the project's options, which may hide how many tests passed.
    options = ["-o", "addopts=--import-mode=importlib", "-q", "-p", "no:cacheprovider", "-m", cases]
    return [sys.executable, "-m", "pytest", f"--rootdir={ROOT}", str(path), *options, *["--collect-only"][:smoke]]


def last_line(output: str) -> str:
    return next((line.strip("= ") for line in reversed(output.splitlines()) if line.strip()), "")


def problem(code: int | None, output: str) -> str:
    """Return what is wrong, from pytest's exit code and output; "" if nothing is. Code 5: no tests in the file."""
    if code is None:
        return "stopped, because the time was up"
    return "" if code in (0, 5) else last_line(output) or f"pytest exited with code {code}"
