"""Errors in a user's own layer, as one line; and errors of options, as one line.

The traceback of an error in a layer has dozens of frames of this package and of torch. Only the innermost line of the
user's code helps. As the exception propagates, each caller adds a note about what it knows (`in_context`), such as
"in layer 3, mlp forward". A command then prints the line of the user's code and the notes, outermost first. An error
without a line of the user's code is one of this package, and keeps its traceback.
"""

import errno
import inspect
import linecache
import os
import traceback
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import dropwhile
from pathlib import Path
from typing import Any

from .messages import describe, printable

# ---- Where the user's code fails ----


@dataclass(frozen=True, slots=True)
class CodeLine:
    """A line of a file, and the function that it is in; "" outside of functions."""

    file: str
    line: int
    function: str = ""

    @classmethod
    def of(cls, source: Any) -> "CodeLine | None":
        """Where a function or class is defined; for a class, its own `segments` or `forward`. None: not in Python."""
        methods = vars(source) if inspect.isclass(source) else {}
        source = inspect.unwrap(methods.get("segments") or methods.get("forward") or source)
        try:
            return cls(inspect.getfile(source), inspect.getsourcelines(source)[1], _short(source.__qualname__))
        except (OSError, TypeError, AttributeError):
            return None

    def __str__(self) -> str:
        shown = os.path.relpath(self.file)
        file = printable(self.file if shown.startswith("..") else shown)
        return f"{file}:{self.line}" + (f" in {self.function}" if self.function else "")


class LayerError(ValueError):
    """An error of this package about a user's layer. line: where the layer is defined, or what it called."""

    def __init__(self, message: str, line: CodeLine | None = None):
        super().__init__(message)
        self.line = line


def in_context(error: BaseException, where: str, source: Any = None) -> None:
    """Note where `error` happened, such as "layer 3, mlp forward", from the inside out.

    source: the user's class or function that was running. If no line of it failed, its definition is reported.
    """
    error.add_note(f"in {where}")
    if source is not None and getattr(error, _SOURCE, None) is None:
        setattr(error, _SOURCE, source)


def without_frames(error: Exception) -> Exception:
    """Return `error`, marked as one that is printed without a traceback, because its message says what and where."""
    setattr(error, _NO_FRAMES, True)
    return error


def needs_no_frames(error: BaseException) -> bool:
    """Whether `error` was marked by `without_frames`."""
    return getattr(error, _NO_FRAMES, False)


def user_line(error: BaseException) -> CodeLine | None:
    """The line of the user's code that caused `error`. None for errors of this package."""
    if isinstance(error, LayerError):
        return error.line
    defined = CodeLine.of(getattr(error, _SOURCE, None))
    frames = _frames(error)
    for owner, line in reversed(frames):
        if owner == "user" or (defined and line.file == defined.file):  # a layer may be in an installed package
            return line
    return defined if frames and frames[-1][0] != "package" else None


def user_error(error: BaseException) -> str | None:
    """`error` on one line if it comes from the user's code, such as

        my_experts.py:14 in MyExperts.forward (layer 2, mlp forward, experts): RuntimeError: mat1 and mat2 shapes ...

    None for errors of this package.
    """
    return _one_line(error, line) if (line := user_line(error)) else None


def describe_user_error(error: BaseException) -> str:
    """Like `user_error`; without a line of the user's code, the type and the message."""
    return _one_line(error, user_line(error))


def fault_of(error: BaseException) -> str:
    """A text that is equal on all ranks that fail in the same way. "" for errors of this package."""
    if (line := user_line(error)) is not None:
        return f"{type(error).__name__} at {line}"
    return describe(error) if needs_no_frames(error) else ""


def error_text(error: BaseException, program: str, full: bool = False) -> str:
    """What a command prints about `error`: one line for an error in the user's code, otherwise a traceback.

    Errors marked by `without_frames`, and missing file descriptors, are also one line. full: always print a traceback.
    """
    line = user_error(error) or out_of_files(error) or (describe(error) if needs_no_frames(error) else None)
    if full or line is None:
        return "".join(traceback.format_exception(error))
    return f"{program}: error: {line}\n"


def out_of_files(error: BaseException) -> str | None:
    """What to do if `error` says that this process has no free file descriptor, also from C++. None: something else."""
    message = "no free file descriptor: raise the limit, as with `ulimit -n 65536`"
    return message if os.strerror(errno.EMFILE) in str(error) else None


_SOURCE, _NO_FRAMES = "_source", "_without_frames"


def _one_line(error: BaseException, line: CodeLine | None) -> str:
    notes = [note.removeprefix("in ") for note in getattr(error, "__notes__", ()) if note.startswith("in ")]
    context = ", ".join(dict.fromkeys(reversed(notes)))
    text = ""
    with suppress(Exception):  # a broken __str__
        text = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    if not text and line is not None:  # as from a bare assert
        text = linecache.getline(line.file, line.line).strip()
    where = "" if line is None else f"{line} ({context})" if context else str(line)
    kind = "" if isinstance(error, LayerError) else type(error).__name__
    return ": ".join(filter(None, [where, kind, printable(text, 1000)]))


def _frames(error: BaseException) -> list[tuple[str, CodeLine]]:
    """The owner and the line of each frame, from the first one of this package inwards."""
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    lines = [CodeLine(code.co_filename, line, _short(code.co_qualname)) for code, line in frames]
    if isinstance(error, SyntaxError) and error.filename:
        lines.append(CodeLine(error.filename, error.lineno or 1))
    owned = ((_owner(line.file), line) for line in lines)
    return [*dropwhile(lambda one: one[0] != "package", owned)]


def _short(qualified: str) -> str:
    return qualified.rpartition("<locals>.")[2].replace("<module>", "")


@cache
def _owner(filename: str) -> str:
    """package, library (torch, Python, what is installed) or user."""
    real, package = Path(os.path.realpath(filename)), Path(__file__).parent
    folders = [package, package / "kernels", package / "models"]  # the last two are links
    if any(real.is_relative_to(os.path.realpath(folder)) for folder in folders):
        return "package"
    installed = {"site-packages", "dist-packages"} & {*real.parts}
    python = filename.startswith(("<frozen ", "<string>", "<eval")) or real.is_relative_to(Path(os.__file__).parent)
    return "library" if installed or python else "user"
