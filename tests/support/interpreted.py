"""Run a benchmark command on a CPU, where Triton's interpreter replaces its compiler."""

import contextlib
import importlib
import io
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_module(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m module arguments` in a new process."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


def run_main(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Call the `main` of `module`, in this process if Triton's interpreter is enabled here: that is faster."""
    if os.environ.get("TRITON_INTERPRET") != "1":  # on a GPU, kernels are already imported for the compiler
        return run_module(module, *arguments)
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = importlib.import_module(module).main([*arguments])
    return subprocess.CompletedProcess([module, *arguments], code, stdout.getvalue(), stderr.getvalue())
