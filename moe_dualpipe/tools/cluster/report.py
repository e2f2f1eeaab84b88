"""The result of a check, as a value, and as text: a verdict for each machine, the links, and the problems."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...messages import plural, printable
from ..drawing.tables import markdown
from .facts import Facts, Machine, machines_of
from .links import LinkSpeed
from .verdicts import GB, Problem, home_of, kinds_of

_VERSIONS = ("Python", "torch", "triton", "CUDA", "NCCL", "driver")


@dataclass(frozen=True, slots=True)
class Report:
    """world_size: the number of ranks that were expected. device: cpu or cuda. note: what was not measured, and why."""

    world_size: int
    device: str
    facts: Sequence[Facts]
    problems: Sequence[Problem]
    links: Sequence[LinkSpeed] = ()
    note: str = ""

    @property
    def passed(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Memory in bytes, speeds in bytes per second, clocks in seconds ahead of rank 0's."""
        return {
            "world_size": self.world_size, "device": self.device, "passed": self.passed, "note": self.note,
            "problems": [asdict(problem) for problem in self.problems],
            "ranks": [asdict(facts) for facts in self.facts], "links": [asdict(link) for link in self.links],
        }  # fmt: skip


def cluster_report(report: Report) -> str:
    """Tables, then the problems, one on each line."""
    machines, device = machines_of(report.facts), "GPUs" if report.device == "cuda" else "CPUs"
    parts = [f"{plural(len(machines), 'machine')}, {plural(report.world_size, 'rank')}, {device}"]
    if machines:
        alike = machines[0].first.alike
        versions = ", ".join(f"{name} {alike[name]}" for name in _VERSIONS if name in alike)
        parts += [_machines(report, machines), f"On {machines[0].name}: {versions}"]
    parts += [_links(report, machines)] if report.links else []
    parts += [report.note] if report.note else []
    return "\n\n".join([*parts, _problems(report)])


def _machines(report: Report, machines: Sequence[Machine]) -> str:
    rows = [["machine", "ranks", "GPUs", "clock", "output folder", "verdict"]]
    for machine in machines:
        one, numbers = machine.first, machine.numbers
        blamed = sum(machine.name in problem.machines for problem in report.problems)
        rows.append([
            machine.name, f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]),
            one.alike.get("GPUs") or "none", "-" if one.clock is None else f"{one.clock:+.1f} s",
            "-" if one.free is None else f"{one.free / GB:.1f} GB free",
            f"see {plural(blamed, 'problem')}" if blamed else "ok",
        ])  # fmt: skip
    return markdown(rows)


def _links(report: Report, machines: Sequence[Machine]) -> str:
    rows, home = [["links, GB/s", "number", "slowest", "median", "fastest", "slowest link"]], home_of(machines)
    for kind in kinds_of(report.links, machines):
        slowest, speeds = min(kind.links, key=lambda link: link.speed), [link.speed for link in kind.links]
        where = " -> ".join(f"{rank} ({home[rank]})" for rank in (slowest.source, slowest.to))
        spread = [f"{speed / GB:.3g}" for speed in (min(speeds), statistics.median(speeds), max(speeds))]
        rows.append([kind.name, f"{len(speeds):,}", *spread, where])
    return markdown(rows)


def _problems(report: Report) -> str:
    if report.passed:
        return "No problems found."
    lines = [f"- {printable(problem, 1000)}" for problem in report.problems]
    return "\n".join([f"{plural(len(report.problems), 'problem')}:", *lines])
