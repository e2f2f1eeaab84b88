"""The traceback of an error in a user's own layer, segment or data, without the frames of torch and of this package.

Between a training loop and a layer are dozens of frames of the engine and of torch, and they are the same for every
error. What helps is the user's code, and the notes that say which rank, action, layer and segment ran it. An error
without a frame of the user is one of this package or of its options: then nothing is left out, unless the message says
it all (messages.without_frames).
"""

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException
from types import TracebackType

import torch

from moe_dualpipe.messages import needs_no_frames

_LEFT_OUT = "  (calls in torch and moe_dualpipe are left out)\n"


def user_traceback(error: BaseException) -> str:
    """Return the traceback of `error`, with its notes and causes, from the first frame of the user's code on."""
    shown = TracebackException.from_exception(error)
    part: TracebackException | None = shown
    left_out = False
    while part is not None:
        frames = [] if part is shown and needs_no_frames(error) else _user_frames([*part.stack])
        left_out |= len(frames) < len(part.stack)
        part.stack = StackSummary.from_list(frames)
        part = part.__cause__ or part.__context__
    lines = [*shown.format()]
    left_out &= lines[0].startswith("Traceback")  # an error without frames and cause has no such line
    return "".join([lines[0], *([_LEFT_OUT] if left_out else []), *lines[1:]])


@contextmanager
def short_tracebacks() -> Iterator[None]:
    """If an error leaves this context and ends the process, Python prints its `user_traceback`."""
    try:
        yield
    except Exception as error:
        before, expected = sys.excepthook, error

        def print_error(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            if error is expected:
                sys.stderr.write(user_traceback(error))
            else:
                before(kind, error, traceback)

        sys.excepthook = print_error
        raise


def _user_frames(frames: list[FrameSummary]) -> list[FrameSummary]:
    """The frames after the first of the package, from the first of the user on. All frames if there are none."""
    owners = [_owner(frame.filename) for frame in frames]
    if "package" not in owners:
        return frames
    first = owners.index("package")
    if "user" not in owners[first:]:
        return frames
    first = owners.index("user", first)
    return [frame for frame, owner in zip(frames[first:], owners[first:], strict=True) if owner != "torch"]


@cache
def _owner(filename: str) -> str:
    """package, torch, library or user."""
    package = Path(__file__).parents[1]
    places = {
        "package": [package, package / "kernels", package / "models"],  # the last two are links
        "torch": [Path(torch.__file__).parent],
        "library": [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")],
    }
    real = os.path.realpath(filename)
    for owner, folders in places.items():
        if any(real.startswith(os.path.realpath(folder) + os.sep) for folder in folders):
            return owner
    return "library" if filename.startswith("<") else "user"
