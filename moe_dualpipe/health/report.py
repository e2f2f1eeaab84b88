"""Print the error that ends a rank: to stderr, and as the cause in torchrun's report of failed processes.

At its end, torchrun prints a box about all failed processes, below everything that they printed. It shows the message
that a process has left in the file of TORCHELASTIC_ERROR_FILE, in the format of `torch.distributed.elastic`'s
`ErrorHandler`; without a file, a link to its documentation.
"""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn


def print_now(text: str) -> None:
    """Print `text` to stderr, from any thread, in one write: other processes write there, too. Never raises."""
    with suppress(OSError):  # stderr may be on a full disk
        os.write(2, text.encode(errors="backslashreplace"))


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
