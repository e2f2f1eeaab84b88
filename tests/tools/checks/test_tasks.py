"""Tasks on ranks: each ends with results or with the first failure, and the next ones run."""

import os
import re
import sys
import time
from pathlib import Path

import pytest

from moe_dualpipe.tools.checks.ranks import Failure, run_tasks


def do(task):
    if task == "die":
        os._exit(7)
    if task == "exit":
        sys.exit(3)
    if isinstance(task, Path):
        task.write_text(str(os.getpid()))
        time.sleep(60)
    return task


def test_a_failed_task_does_not_end_the_others():
    first, died, left, last = run_tasks(1, do, ["first", "die", "exit", "last"])
    assert (first, last) == (["first"], ["last"])
    assert died == Failure(0, "the process ended with code 7")
    assert re.fullmatch(r"rank 0: tests/tools/checks/test_tasks.py:\d+ in do: SystemExit: 3", str(left))


def test_a_task_that_hangs_is_ended_after_the_timeout(tmp_path):
    assert run_tasks(1, do, [tmp_path / "process"], timeout=1) == [Failure(0, "no result after 1 second")]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "process").read_text()), 0)


def test_a_function_that_another_process_cannot_import_is_refused():
    with pytest.raises(ValueError, match="cannot be sent to another process"):
        run_tasks(1, lambda task: task, [1])
