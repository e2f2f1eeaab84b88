"""What a check found: one row per law."""

from dataclasses import dataclass
from textwrap import fill
from typing import Literal

from ...messages import plural, printable

Status = Literal["passed", "failed", "warning", "skipped"]

_WIDTH = 120
_SHOWN = {"failed": "FAILED"}
_ENDINGS: dict[Status, tuple[str, str]] = {
    "passed": ("check passed", "checks passed"), "failed": ("failed", "failed"),
    "warning": ("warning", "warnings"), "skipped": ("skipped", "skipped"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    name: the law, in a few words: "ep=2 equals ep=1". measured: what was compared, in numbers. problem: what is wrong
    and where, in plain words; for a skipped check, why.
    """

    name: str
    status: Status
    measured: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The results of all checks of one subject, in order. `str(report)` is the table that the command prints.

    not_run: the names of checks that were left out because one that they rely on failed.
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
        heading = Check("check", "passed", "measured")
        rows = [(heading.name, "result", heading.measured)]
        rows += [(printable(c.name), _SHOWN.get(c.status, c.status), printable(c.measured, 400)) for c in self.checks]
        first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
        lines = [printable(self.subject)]
        for (name, result, measured), check in zip(rows, (heading, *self.checks), strict=True):
            lines.append(f"{name:{first}}  {result:{second}}  {measured}".rstrip())
            if check.problem:
                lines.append(_indented(printable(check.problem, 4000)))
        counts = [(self.count(status), endings) for status, endings in _ENDINGS.items()]
        total = [f"{count} {endings[count != 1]}" for count, endings in counts if count]
        total += [f"{len(self.not_run)} not run"] if self.not_run else []
        return "\n".join([*lines, ", ".join(total) or plural(0, "check")])


def _indented(text: str) -> str:
    return fill(text, _WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
