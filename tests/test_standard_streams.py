"""Standard output and error on a full disk, in a pipe without a reader, and closed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import ROOT

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
# It writes more than a pipe holds (64 KiB), so that it notices a reader that ends early.
SCRIPT = """
import sys
from moe_dualpipe.standard_streams import protect_streams
protect_streams("stdout", "stderr")
for i in range(9000):
    print("line", i, "\\u2603", flush=i % 100 == 0)
print("an error", file=sys.stderr)
with open(sys.argv[1], "w") as file:
    print("not in the file", flush=True)
    print("not in the file", file=sys.stderr)
    file.write(str(file.fileno()))
    sys.stdout.flush()
print("not flushed", end="")
sys.exit(3) if len(sys.argv) < 3 else 1 / 0
"""


def shell(script, *arguments, redirection):
    line = f'"$@" {redirection}; exit ${{PIPESTATUS[0]}}'
    words = ["bash", "-c", line, "bash", sys.executable, *script, *map(str, arguments)]
    return subprocess.run(words, cwd=ROOT, env={"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)


@pytest.mark.parametrize("redirection,warning", [
    ("> /dev/full", "No space left on device"), ("> /dev/full 2> /dev/full", None), ("2> /dev/full", None),
    (">&-", None), (">&- 2>&-", None), ("<&- >&- 2>&-", None), ("| head -1", "Broken pipe"), ("", None),
])  # fmt: skip
def test_protected_streams_drop_what_cannot_be_written(tmp_path, redirection, warning):
    done = shell(["-c", SCRIPT], tmp_path / "file", redirection=redirection)
    assert done.returncode == 3
    assert int((tmp_path / "file").read_text()) > 2
    stderr = done.stderr.splitlines()
    assert stderr == [] if "2>" in redirection else stderr[-2:] == ["an error", "not in the file"]
    assert stderr[:-2] == ([f"-c: warning: standard output cannot be written: {warning}"] if warning else [])
    if redirection in ("", "2> /dev/full"):
        assert done.stdout.startswith("line 0 \\u2603\n")
        assert done.stdout.endswith("line 8999 \\u2603\nnot in the file\nnot flushed")


def test_an_exception_still_exits_with_code_1(tmp_path):
    assert shell(["-c", SCRIPT], tmp_path / "file", "fail", redirection="> /dev/full 2> /dev/full").returncode == 1


RUN = """
import os, runpy, sys
file, sys.argv = sys.argv[1], ["train.py", "--help"]
try:
    runpy.run_path("train.py", run_name="__main__")
finally:
    with open(file, "w") as opened:
        opened.write(" ".join(os.readlink(f"/proc/self/fd/{number}") for number in range(3)))
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
def test_closed_streams_of_train_py_do_not_become_other_files(tmp_path):
    assert shell(["-c", RUN], tmp_path / "file", redirection="<&- >&- 2>&-").returncode == 0
    assert (tmp_path / "file").read_text() == "/dev/null /dev/null /dev/null"


@pytest.mark.parametrize("arguments,redirection,code,errors", [
    ("schedule show 1f1b --ranks 2 --micro-batches 4", "> /dev/full 2> /dev/full", 1, ""),
    ("--help", "> /dev/full", 1, "moe-dualpipe: error: standard output: No space left on device\n"),
    ("--help", "| true", 0, ""),
    ("schedule show 1f1b --ranks 2 --micro-batches 4", ">&- 2>&-", 0, ""),
])  # fmt: skip
def test_commands_end_without_a_traceback(arguments, redirection, code, errors):
    done = shell(["-m", "moe_dualpipe.cli"], *arguments.split(), redirection=redirection)
    assert (done.returncode, done.stderr) == (code, errors)
