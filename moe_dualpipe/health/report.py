"""How this process is named, prints and ends.

Training starts as train.py, as another script that calls its `main`, or as `moe-dualpipe train`, whose modules are
cli.py and __main__.py. Each of them runs alone or under torchrun. At its end, torchrun prints a box about all failed
processes, below everything that they printed. It shows the message that a process has left in the file of
TORCHELASTIC_ERROR_FILE, in the format of `torch.distributed.elastic`'s `ErrorHandler`; without a file, a link to its
documentation.
"""

import json
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from ..messages import describe

CONSOLE_SCRIPT = "moe-dualpipe"
_CHECKS = 20


def program_name() -> str:
    """This program, as messages name it: the script that trains, or the console script."""
    if not _is_console_script():
        return "train.py"
    return f"{CONSOLE_SCRIPT} train" if sys.argv[1:2] == ["train"] else CONSOLE_SCRIPT


def training_command(processes: int | None) -> list[str]:
    """The words of a command that starts training in the way in which this process was started.

    processes: the number that torchrun starts on each machine. None: without torchrun.
    """
    launcher = []
    if processes:
        machines = os.environ.get("GROUP_WORLD_SIZE", "1")
        several = ["--nnodes", machines] if machines != "1" else []
        launcher = [_executable("torchrun"), *several, "--nproc-per-node", str(processes)]
    if _is_console_script():
        return [*launcher, *(["--no-python"] if launcher else []), _executable(CONSOLE_SCRIPT), "train"]
    return [*(launcher or [_executable("python")]), os.path.relpath(sys.argv[0])]


def _is_console_script() -> bool:
    path = Path(sys.argv[0])
    return path.name in (CONSOLE_SCRIPT, "cli.py") or path.parts[-2:] == ("moe_dualpipe", "__main__.py")


def _executable(name: str) -> str:
    """`name` if the shell finds the program next to this interpreter, otherwise its path."""
    path = Path(sys.executable).with_name(name)
    if not path.exists() or shutil.which(name) == str(path):
        return name
    return os.path.relpath(path)


# ---- Messages ----


def print_now(text: str) -> None:
    """Print `text` to stderr, from any thread, in one write: other processes write there, too. Never raises."""
    with suppress(OSError):  # stderr may be on a full disk
        os.write(2, text.encode(errors="backslashreplace"))


def warn(text: str) -> None:
    """Print a warning, on a line of its own after a progress bar. Never raises."""
    print_now(f"\n{program_name()}: warning: {text}\n")


def report_error(text: str) -> None:
    """Print `text`, which ends with a newline. If it is a single line, torchrun's report gets it, too."""
    print_now(text)
    if (file := os.environ.get("TORCHELASTIC_ERROR_FILE")) and text.count("\n") == 1:
        message = {"message": text.strip(), "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):  # the disk may be full
            Path(file).write_text(json.dumps({"message": message}))


def end_process(code: int, text: str = "", seconds: float = 0.0) -> NoReturn:
    """Print `text` to stderr and exit after `seconds`, without destructors: these may wait for dead ranks.

    From any thread.
    """
    print_now(text)
    time.sleep(seconds)
    os._exit(code)


@contextmanager
def exit_on_invalid_option(
    announce: bool, *kinds: type[Exception], full_traceback: bool = False
) -> Iterator[None]:  # fmt: skip
    """In this context, errors of these kinds end the process with code 2. announce: print them, on one line.

    full_traceback: also print the traceback of an error whose cause is one in a user's layer.
    """
    try:
        yield
    except kinds as error:
        if announce:
            if full_traceback and error.__cause__ is not None:
                report_error("".join(traceback.format_exception(error)))
            report_error(f"{program_name()}: error: {describe(error)}\n")
        raise SystemExit(2) from None


class Deadline:
    """Inside this context, `renew` must be called every `seconds`; otherwise the process ends, even if it waits in C++.

    It then prints one line, "train.py: <text>", and exits with code 1. The rendezvous store answers a `get` or a
    `check` over TCP. When its machine is cut off or frozen, no packet says so: the client waits forever, whatever
    timeout it was given. So another thread counts the seconds, and calls nothing that can block. Time is counted in
    checks, 20 in `seconds`, so the time during which a machine was suspended does not count.
    """

    def __init__(self, seconds: float, text: str):
        self.text = text
        self._interval, self._checks, self._over = seconds / _CHECKS, 0, threading.Event()
        self._thread = threading.Thread(target=self._count, name="deadline", daemon=True)

    def renew(self) -> None:
        """Restart the count, from any thread."""
        self._checks = 0

    def __enter__(self) -> "Deadline":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()  # at once: it never waits for anything else

    def _count(self) -> None:
        while not self._over.wait(self._interval):
            self._checks += 1
            if self._checks > _CHECKS:
                end_process(1, f"{program_name()}: {self.text}\n")
