"""Print warnings, and the error that ends a rank: to stderr, and as the cause in torchrun's report of failed processes.

At its end, torchrun prints a box about all failed processes, below everything that they printed. It shows the message
that a process has left in the file of TORCHELASTIC_ERROR_FILE, in the format of `torch.distributed.elastic`'s
`ErrorHandler`; without a file, a link to its documentation.
"""

import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from ..messages import describe
from .program import program_name


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
