"""What a check found: one row per law."""

from dataclasses import dataclass
from textwrap import wrap
from typing import Literal

from ...messages import printable

Status = Literal["passed", "failed", "warning", "skipped"]


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
