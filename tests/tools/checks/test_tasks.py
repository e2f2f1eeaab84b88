"""A task on ranks ends with results or with the first failure."""

import os
import re
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from moe_dualpipe.tools.checks.ranks import _PRELOADED, Failure, run_task


def do(task):
    if task == "die":
        os._exit(7)
    if task == "exit":
        sys.exit(3)
    if isinstance(task, Path):
        task.write_text(str(os.getpid()))
        time.sleep(60)
    return task


@pytest.mark.parametrize("task,failure", [
    ("die", "rank 0: the process ended with code 7"),
    ("exit", r"rank 0: tests/tools/checks/test_tasks.py:\d+ in do: SystemExit: 3"),
])  # fmt: skip
def test_a_task_that_fails_is_a_failure(task, failure):
    assert re.fullmatch(failure, str(run_task(1, do, task)))


def test_a_task_that_hangs_is_ended_after_the_timeout(tmp_path):
    assert run_task(1, do, tmp_path / "process", timeout=5) == Failure(0, "no result after 5 seconds")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "process").read_text()), 0)


def test_a_function_that_another_process_cannot_import_is_refused():
    with pytest.raises(ValueError, match="cannot be sent to another process"):
        run_task(1, lambda task: task, 1)


def test_what_ranks_preload_exists():
    assert all(find_spec(name) for name in _PRELOADED)
