"""Print the error that ends a rank: to stderr, and as the cause in torchrun's report of failed processes.

At its end, torchrun prints a box about all failed processes, below everything that they printed. It shows the message
that a process has left in the file of TORCHELASTIC_ERROR_FILE, in the format of `torch.distributed.elastic`'s
`ErrorHandler`; without a file, a link to its documentation.
"""

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path


def report_error(text: str) -> None:
    """Print `text`, which ends with a newline. If it is a single line, torchrun's report gets it, too."""
    sys.stderr.write(text)  # one write: other processes write to stderr, too
    sys.stderr.flush()
    if (file := os.environ.get("TORCHELASTIC_ERROR_FILE")) and text.count("\n") == 1:
        message = {"message": text.strip(), "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):  # the disk may be full
            Path(file).write_text(json.dumps({"message": message}))
