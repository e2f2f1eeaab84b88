"""Laws of a layer, and how a table of them becomes a report.

A law is a value: its name, the kinds of layers that it applies to, and a function of a subject. The function returns
what it measured, or raises Broken, Suspect or Unchecked, with the reason in plain words.

A fault often breaks several laws. So laws are grouped into levels, each of which relies on all levels above it. The
first level in which a law fails is the last one that runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any, Literal

from ...errors import describe_user_error, needs_no_frames, user_error
from ...messages import describe, printable

KINDS = ("experts", "router", "attention", "block")
Status = Literal["passed", "failed", "warning", "skipped"]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    name: the law, such as "any ep equals ep=1". measured: what was compared, in numbers. problem: what is wrong and
    where; of a skipped check, why it was skipped.
    """

    name: str
    status: Status
    measured: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The results of all checks, in order. `str(report)` is the table that the command prints.

    not_run: names of checks that were not run, because a check that they rely on failed.
    """

    subject: str
    checks: tuple[Check, ...]
    not_run: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether no check failed. Warnings and skipped checks are not failures."""
        return not self.count("failed")

    def count(self, status: Status) -> int:
        return sum(check.status == status for check in self.checks)

    def __str__(self) -> str:
        first = max(len(printable(check.name)) for check in (*self.checks, Check("check", "passed")))
        lines = [printable(self.subject), f"{'check':{first}}  result   measured"]
        for check in self.checks:
            result = "FAILED" if check.status == "failed" else check.status
            lines.append(f"{printable(check.name):{first}}  {result:7}  {printable(check.measured, 400)}".rstrip())
            if check.problem:
                lines += wrap(printable(check.problem, 4000), 120, initial_indent="    ", subsequent_indent="    ",
                              break_on_hyphens=False)  # fmt: skip
        total = [f"{n} {status}" for status in ("passed", "failed", "warning", "skipped") if (n := self.count(status))]
        return "\n".join([*lines, ", ".join([*total, *[f"{len(self.not_run)} not run"] * bool(self.not_run)])])


class Finding(Exception):  # noqa: N818 - a result of a check
    """A law that does not hold, or cannot be checked. The message says what is wrong, where, and how to fix it."""

    status: Status = "failed"


class Broken(Finding):
    pass


class Suspect(Finding):
    status = "warning"


class Unchecked(Finding):
    status = "skipped"


@dataclass(frozen=True, slots=True)
class Law:
    name: str
    check: Callable[[Any], str]
    kinds: Sequence[str] = KINDS


def check_laws(title: str, where: str, subject: Any, levels: Sequence[Sequence[Law]], raise_errors: bool) -> Report:
    """Check the laws of the subject's kind in order, until a level fails.

    where: the file and line of the layer; each problem starts with it. raise_errors: raise exceptions of the layer,
    instead of reporting each as a failed check.
    """
    checks, left = list[Check](), [[law for law in level if subject.kind in law.kinds] for level in levels]
    while left and not any(check.status == "failed" for check in checks):
        checks += (_check(where, subject, law, raise_errors) for law in left.pop(0))
    return Report(title, tuple(checks), tuple(law.name for level in left for law in level))


def _check(where: str, subject: Any, law: Law, raise_errors: bool) -> Check:
    try:
        return Check(law.name, "passed", law.check(subject))
    except Finding as finding:
        prefix = f"{where}: " if where and finding.status == "failed" else ""
        return Check(law.name, finding.status, problem=f"{prefix}{finding}")
    except Exception as error:
        if raise_errors:
            raise
        return Check(law.name, "failed", problem=_error_line(error, where))


def _error_line(error: Exception, where: str) -> str:
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()) if note.startswith("with "))
    if line := user_error(error):
        return line + notes
    text = describe(error) if needs_no_frames(error) else describe_user_error(error)
    return f"{where}: {text}{notes}" if where else text + notes
