"""Laws of a layer, and how a list of them becomes a report.

A law is a function of a subject. It returns what it measured, or raises Broken, Suspect or Unchecked, with the reason
in plain words. A fault often breaks several laws, so each law names the laws that it relies on. If one of them fails,
the law is skipped, and the report names the cause.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...errors import describe_user_error, needs_no_frames, user_error
from ...messages import describe
from .report import Check, Report, Status


class Finding(Exception):  # noqa: N818 - a result of a check
    """The law does not hold, or could not be checked. The message says what is wrong, where, and how to fix it."""

    status: Status = "failed"


class Broken(Finding):
    pass


class Suspect(Finding):
    status = "warning"


class Unchecked(Finding):
    status = "skipped"


def check_like_input(what: str, x: Tensor, y: object, rows: str = "") -> None:
    """Raise Broken unless `y`, which `what` returned for `x`, has the same shape and dtype."""
    expected = f"{what} must return {rows}{[*x.shape]} in {x.dtype}, like its input"
    if not isinstance(y, Tensor):
        raise Broken(f"{expected}: got {type(y).__name__}")
    if y.shape != x.shape:
        raise Broken(f"{expected}: got {[*y.shape]}")
    if y.dtype != x.dtype:
        raise Broken(f"{expected}: got {y.dtype}. End forward with `y.to(x.dtype)`")


@dataclass(frozen=True, slots=True)
class Law:
    """name: the law, in a few words. needs: names of other laws; if one of them fails, this law is skipped."""

    name: str
    check: Callable[[Any], str]
    needs: Sequence[str] = ()


def check_laws(title: str, where: str, subject: Any, laws: Sequence[Law], raise_errors: bool = False) -> Report:
    """Check all laws in order. where: the file and line of the layer; each problem starts with it.

    raise_errors: raise exceptions of the layer, instead of reporting each as a failed check.
    """
    return Report(title, tuple(_results(where, subject, laws, raise_errors)))


def _results(where: str, subject: Any, laws: Sequence[Law], raise_errors: bool) -> Iterator[Check]:
    without: dict[str, str] = {}  # each law that failed or was skipped -> the law that failed first
    for law in laws:
        if cause := next((without[name] for name in law.needs if name in without), None):
            without[law.name] = cause
            yield Check(law.name, "skipped", problem=f"depends on a failed check: {cause}")
            continue
        try:
            yield Check(law.name, "passed", law.check(subject))
        except Finding as finding:
            if finding.status == "failed":
                without[law.name] = law.name
            prefix = f"{where}: " if where and finding.status == "failed" else ""
            yield Check(law.name, finding.status, problem=f"{prefix}{finding}")
        except Exception as error:
            if raise_errors:
                raise
            without[law.name] = law.name
            yield Check(law.name, "failed", problem=_error_line(error, where))


def _error_line(error: Exception, where: str) -> str:
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()) if note.startswith("with "))
    if line := user_error(error):
        return line + notes
    if error.__cause__ is not None and user_error(error.__cause__) is not None:  # the message has its place
        return describe(error) + notes
    text = describe(error) if needs_no_frames(error) else describe_user_error(error)
    return f"{where}: {text}{notes}" if where else text + notes
