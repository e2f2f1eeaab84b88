"""Errors in a user's own layer, as one line: the file, line and function that failed, and the layer of the model.

The traceback of such an error has dozens of frames of this package and of torch. Only the innermost line of the user's
code helps. As an exception propagates, each caller adds what it knows (`locate`): the layer, the part of it, the class.
The command then prints `error_text`. An error without a line of the user's code is one of this package, and keeps its
traceback.
"""

import inspect
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .messages import describe, printable


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file, and the function that it is in; "" outside of functions."""

    file: str
    line: int
    function: str = ""

    @classmethod
    def of(cls, source: Any) -> "Place | None":
        """Where a function or class is defined; for a class, its `segments` or `forward` if that is in its file."""
        if inspect.isclass(source):
            for method in ("segments", "forward"):
                place = cls.of(getattr(source, method, None))
                if place is not None and _same_file(place.file, _file_of(source)):
                    return place
        function = inspect.unwrap(source) if callable(source) else None
        code = getattr(function, "__code__", None)
        if code is not None:
            return cls(code.co_filename, code.co_firstlineno, _function_name(code.co_qualname))
        try:
            return cls(_file_of(source), inspect.getsourcelines(source)[1], _function_name(source.__qualname__))
        except (OSError, TypeError, AttributeError):  # defined without a file, or not in Python
            return None

    def __str__(self) -> str:
        shown = os.path.relpath(self.file)
        file = printable(self.file if shown.startswith("..") else shown)
        return f"{file}:{self.line}" + (f" in {self.function}" if self.function else "")


@dataclass(slots=True)
class _Where:
    """What is known about where an error happened; None: not known."""

    step: int | None = None
    rank: int | None = None
    layer: int | None = None
    part: str | None = None
    source: Any = None
    place: Place | None = None


def locate(error: BaseException, **known: Any) -> None:
    """Add to `error` where it happened. What is known already is kept: the innermost caller knows best.

    step, rank, layer: numbers. part: the part of the layer, such as "experts". source: the user's class or function
    that was running. If no line of it failed, the error is reported at its definition. place: the line to report, for
    this package's errors about what a user's code returned; the type of the exception is then not shown.
    """
    where = _where(error)
    for name, value in known.items():
        if getattr(where, name) is None:
            setattr(where, name, value)
    setattr(error, _WHERE, where)


def user_place(error: BaseException) -> Place | None:
    """The line of the user's code that caused `error`. None for errors of this package."""
    where = _where(error)
    if where.place is not None:
        return where.place
    return _syntax_error(error) or _failing_line(error, where.source)


def user_error(error: BaseException) -> str | None:
    """`error` on one line if it comes from the user's code, such as

        my_experts.py:14 in MyExperts.forward (layer 2, experts): RuntimeError: mat1 and mat2 shapes cannot be ...

    None for errors of this package.
    """
    if (place := user_place(error)) is None:
        return None
    where = _where(error)
    numbers = {"step": where.step, "rank": where.rank, "layer": where.layer}
    known = [f"{name} {number}" for name, number in numbers.items() if number is not None]
    context = ", ".join([*known, *filter(None, [where.part])])
    message = describe(error) if where.place is not None else f"{type(error).__name__}{_message(error, place)}"
    return f"{place}{f' ({context})' if context else ''}: {message}"


def describe_user_error(error: BaseException) -> str:
    """Like `user_error`, for an error of code that the user named, which may also be in an installed package."""
    if line := user_error(error):
        return line
    place = _failing_line(error, None, ("user", "installed"))
    kind = f"{type(error).__name__}{_message(error, place)}"
    return f"{place}: {kind}" if place is not None else kind


def fault_of(error: BaseException) -> str:
    """A text that is equal on all ranks that fail in the same way. "" for errors of this package."""
    if (place := user_place(error)) is not None:
        return f"{type(error).__name__} at {place}"
    return describe(error) if needs_no_frames(error) else ""


def error_text(error: BaseException, program: str, full: bool = False) -> str:
    """What a command prints about `error`: one line for an error in the user's code, otherwise a traceback.

    Errors marked by `without_frames` are also one line. full: always print a traceback.
    """
    line = user_error(error) or (describe(error) if needs_no_frames(error) else None)
    if full or line is None:
        return "".join(traceback.format_exception(error))
    return f"{program}: error: {line}\n"


def without_frames(error: Exception) -> Exception:
    """Return `error`, marked as one that is printed without a traceback, because its message says what and where."""
    setattr(error, _NO_FRAMES, True)
    return error


def needs_no_frames(error: BaseException) -> bool:
    """Whether `error` was marked by `without_frames`."""
    return getattr(error, _NO_FRAMES, False)


_WHERE, _NO_FRAMES = "_where", "_without_frames"


def _where(error: BaseException) -> _Where:
    return getattr(error, _WHERE, None) or _Where()


def _message(error: BaseException, place: Place | None) -> str:
    """The message on one line, after a colon. Without a message, as from a bare assert, the line of code."""
    text = error.msg if isinstance(error, SyntaxError) else " ".join(_string(error).split())
    if not text and place is not None:
        text = linecache.getline(place.file, place.line).strip()
    return f": {printable(text, 1000)}" if text else ""


def _string(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "<unprintable>"


def _syntax_error(error: BaseException) -> Place | None:
    if isinstance(error, SyntaxError) and error.filename and _owner(error.filename) in ("user", "installed"):
        return Place(error.filename, error.lineno or 1)
    return None


def _failing_line(error: BaseException, source: Any, owners_to_blame: Sequence[str] = ("user",)) -> Place | None:
    """The innermost line of the user below the first frame of this package."""
    frames = [*traceback.walk_tb(error.__traceback__)]
    owners = [_owner(frame.f_code.co_filename) for frame, _ in frames]
    if "package" not in owners:
        return None
    first = owners.index("package")
    file = _file_of(source)
    for (frame, line), owner in reversed([*zip(frames[first:], owners[first:], strict=True)]):
        name = frame.f_code.co_filename
        if owner in owners_to_blame or (source is not None and _same_file(name, file)):  # also in an installed package
            return Place(name, line, _function_name(frame.f_code.co_qualname))
    return Place.of(source) if source is not None and owners[-1] != "package" else None


def _function_name(qualified: str) -> str:
    name = qualified.rpartition("<locals>.")[2]
    return "" if name == "<module>" else name


def _file_of(source: Any) -> str:
    module = sys.modules.get(getattr(source, "__module__", None) or "")
    return getattr(module, "__file__", None) or ""


def _same_file(name: str, other: str) -> bool:
    return bool(other) and os.path.realpath(name) == os.path.realpath(other)


@cache
def _owner(filename: str) -> str:
    """package, torch, python (the standard library), installed (another package) or user."""
    package = Path(__file__).parent
    packages = [sys.modules[name].__file__ for name in ("torch", "triton") if name in sys.modules]
    places = {
        "package": [package, package / "kernels", package / "models"],  # the last two are links
        "torch": [Path(file).parent for file in packages if file],
        "python": [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")],
    }
    real = os.path.realpath(filename)
    installed = bool({"site-packages", "dist-packages"} & {*Path(real).parts})
    if installed:
        places.pop("python")  # the folder of the standard library may contain site-packages
    for owner, folders in places.items():
        if any(real.startswith(os.path.realpath(folder) + os.sep) for folder in folders):
            return owner
    if filename.startswith(("<frozen ", "<string>", "<eval")):
        return "python"
    return "installed" if installed else "user"
