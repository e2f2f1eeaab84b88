"""The result of a check, as a value, and as text: machines, links, expert groups, and the problems."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...messages import plural, printable
from ..drawing.tables import markdown
from .facts import Facts, Machine, machines_of
from .link_verdicts import home_of, kinds_of
from .links import Exchange, LinkSpeed
from .verdicts import GB, Problem, gpu_text

_MANY = 50
"""Problems that are printed one by one."""


@dataclass(frozen=True, slots=True)
class Report:
    """world_size: the number of ranks that were expected. device: cpu or cuda. note: what was not measured, and why."""

    world_size: int
    device: str
    facts: Sequence[Facts]
    problems: Sequence[Problem]
    links: Sequence[LinkSpeed] = ()
    exchanges: Sequence[Exchange] = ()
    note: str = ""

    @property
    def passed(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Memory in bytes, speeds in bytes per second, clocks in seconds ahead of rank 0's."""
        return {
            "world_size": self.world_size, "device": self.device, "passed": self.passed, "note": self.note,
            "problems": [asdict(problem) for problem in self.problems],
            "ranks": [facts.to_json() for facts in self.facts],
            "links": [asdict(link) for link in self.links],
            "all_to_all": [asdict(exchange) for exchange in self.exchanges],
        }  # fmt: skip


def cluster_report(report: Report) -> str:
    """Tables, then the problems, one on each line."""
    machines = machines_of(report.facts)
    ranks = plural(report.world_size, "rank")
    parts = [
        f"{plural(len(machines), 'machine')}, {ranks}, {'GPUs' if report.device == 'cuda' else 'CPUs'}",
        *[_machines(machines)] * bool(machines), _versions(report.facts),
    ]  # fmt: skip
    if report.links:
        parts += [_links(report, machines)]
    if report.exchanges:
        parts.append(_exchanges(report))
    if report.note:
        parts.append(report.note)
    return "\n\n".join([*parts, _problems(report)])


def _machines(machines: Sequence[Machine]) -> str:
    rows = [["machine", "ranks", "GPUs", "clock", "/dev/shm", "open files", "output folder", "written at"]]
    for machine in machines:
        first, numbers = machine.first, machine.numbers
        disk = first.disk if first.disk is not None and not first.disk.error else None
        rows.append([
            machine.name, f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0]),
            gpu_text(machine) or "none", "-" if first.clock is None else f"{first.clock:+.1f} s",
            "none" if first.shm is None else _gigabytes(first.shm),
            "unlimited" if first.open_files == -1 else f"{first.open_files:,}",
            "-" if disk is None else f"{_gigabytes(disk.free)} free",
            "-" if disk is None or disk.write_speed is None else f"{disk.write_speed / 1e6:.0f} MB/s",
        ])  # fmt: skip
    return markdown(rows)


def _gigabytes(size: int) -> str:
    return f"{size / GB:.1f} GB"


def _versions(facts: Sequence[Facts]) -> str:
    """The versions of the first rank. Those that differ are problems."""
    if not facts:
        return "No facts."
    where = "" if all(one.versions == facts[0].versions for one in facts) else f"On {facts[0].host}: "
    return where + ", ".join(f"{name} {version}" for name, version in facts[0].versions.items())


def _links(report: Report, machines: Sequence[Machine]) -> str:
    rows = [["links, GB/s", "number", "slowest", "median", "fastest", "slowest link"]]
    home = home_of(machines)
    for kind in kinds_of(report.links, machines):
        slowest = min(kind.links, key=lambda link: link.speed)
        ends = (slowest.source, slowest.to)
        where = " -> ".join(f"{rank} ({home[rank]})" for rank in ends)
        speeds = [link.speed for link in kind.links]
        rows.append([kind.name, f"{len(speeds):,}", *_spread(speeds), where])
    return markdown(rows)


def _spread(speeds: Sequence[float]) -> list[str]:
    """The slowest, the median and the fastest."""
    return [f"{speed / GB:.3g}" for speed in (min(speeds), statistics.median(speeds), max(speeds))]


def _exchanges(report: Report) -> str:
    size = len(report.exchanges[0].ranks)
    slowest = min(report.exchanges, key=lambda exchange: exchange.speed)
    where = f"{slowest.ranks[0]}-{slowest.ranks[-1]}"
    rows = [["all-to-all, GB/s of a rank", "groups", "slowest", "median", "fastest", "slowest group"]]
    speeds = [exchange.speed for exchange in report.exchanges]
    rows.append([f"groups of {plural(size, 'rank')}", str(len(speeds)), *_spread(speeds), where])
    return markdown(rows)


def _problems(report: Report) -> str:
    if report.passed:
        return "No problems found."
    lines = [f"- {printable(problem, 1000)}" for problem in report.problems[:_MANY]]
    if (more := len(report.problems) - _MANY) > 0:
        lines.append(f"- and {more:,} more: --json FILE has all of them")
    return "\n".join([f"{plural(len(report.problems), 'problem')}:", *lines])
