"""What is wrong with the machines of a run: pure functions from facts and links to problems, and to a report.

A fact is compared with that of most ranks, and a limit is a row of a table. A link is compared with others of its
kind, within a machine or between machines. One bad cable makes many links slow, so slow links that share a machine, a
pair of machines or a rank are named once.
"""

import re
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...messages import list_ranks, plural, printable
from ..drawing.tables import markdown
from .facts import Facts, Machine, machines_of
from .links import LinkSpeed

_VERSIONS = ("Python", "torch", "triton", "CUDA", "NCCL", "driver")
GB = 10**9
SLOW = 0.5
"""A link is slow below this share of the usual speed of its kind."""
MAX_CLOCK = 5.0
"""Seconds by which clocks may differ, more than a message may take."""
_PRIVATE_SETTING = re.compile(r".*_IFNAME|NCCL_(IB_HCA|DEBUG.*|HOSTID|TOPO\w*|GRAPH\w*|.*_FILE)")
"""Settings that may differ between machines."""
_WAYS_OUT = {
    "GPUs": "use equal machines: all ranks wait for the slowest one",
    "InfiniBand ports": "check cards and cables with ibstat",
    "number of processes": "start as many on each machine, with the same --nproc-per-node",
    "within a machine": "look for another program on it, and check its GPUs with nvidia-smi topo -m and dcgmi diag",
    "between machines": "check the cable, the switch port and the network card (nccl-tests measures pairs of machines)",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, where, and how to fix it, in words. machines: the names of those that may be at fault.

    stops: links cannot be measured before it is solved.
    """

    where: str
    what: str
    way_out: str
    stops: bool = False
    machines: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.where}: {self.what}: {self.way_out}"


def device_of(facts: Sequence[Facts], wanted: str) -> str:
    """cpu or cuda: auto is cuda if each rank has a GPU."""
    if wanted != "auto":
        return wanted
    return "cuda" if facts and all(one.gpu_used is not None for one in facts) else "cpu"


def find_problems(
    facts: Sequence[Facts], world_size: int, min_free: int = 10 * GB, device: str = "auto"
) -> list[Problem]:
    """The problems of the machines whose facts are given, first those that stop. min_free: bytes of the output folder.

    device: auto, cpu or cuda.
    """
    machines = machines_of(facts)
    found = [*_differences([machine for machine in machines if not machine.first.failed])]
    for machine in machines:
        for what, way_out, stops in _limits(machine, len(machines) > 1, world_size, min_free, device):
            found.append(Problem(_place(machine), what, way_out, stops, (machine.name,)))
    return sorted(found, key=lambda problem: not problem.stops)


def _place(machine: Machine) -> str:
    return f"{machine.name} ({list_ranks(machine.numbers)})"


def _differences(machines: Sequence[Machine]) -> Iterator[Problem]:
    """Facts of a rank that differ from those of most ranks. In a tie, the first rank counts."""
    ranks = [one for machine in machines for one in machine.ranks]
    for name in dict.fromkeys(name for one in ranks for name in one.alike):
        if _PRIVATE_SETTING.fullmatch(name):
            continue
        version = name in ("Python", "torch", "moe-dualpipe", "triton", "CUDA", "NCCL", "driver")
        default = "install the same version on all machines" if version else "set it to the same value on all machines"
        way_out, stops = _WAYS_OUT.get(name, default), name in ("torch", "NCCL", "moe-dualpipe")
        ((usual, number),) = Counter(one.alike.get(name, "") for one in ranks).most_common(1)
        for machine in machines:
            others = sorted({one.alike.get(name, "") for one in machine.ranks} - {usual})
            if others:
                what = f"{name} {' and '.join(other or 'none' for other in others)}, but {usual or 'none'} on "
                what += plural(number, "other rank")
                yield Problem(_place(machine), what, way_out, stops, (machine.name,))


def _limits(
    machine: Machine, several: bool, world_size: int, min_free: int, device: str
) -> Iterator[tuple[str, str, bool]]:
    """What is below a limit on a machine: in words, how to fix it, and whether it stops the check."""
    one, cuda, ahead = machine.first, device == "cuda", machine.first.clock or 0.0
    # gloo has a socket to each rank of each group, and NCCL several files for each GPU.
    need = max(512 + 8 * world_size, 4096 if one.num_gpus else 0)
    files = min([r.open_files for r in machine.ranks if r.open_files not in (-1, None)], default=need)
    busy = [r for r in machine.ranks if r.gpu_used is not None and r.gpu_used > 0.1]
    local = not one.address or one.address == "::1" or one.address.startswith("127.")
    resolves = f"resolves to {one.address}" if one.address else "does not resolve"
    built = "its CUDA version needs another driver" if "CUDA" in one.alike else "it is built without CUDA"
    failed = [f"rank {r.rank}: {r.failed}" for r in machine.ranks if r.failed]
    rows: list[tuple[bool, str, str, bool]] = [
        (bool(failed), " and ".join(failed), "look at this machine first", True),
        (device != "cpu" and one.gpu_files > 0 and not one.num_gpus,
         f"{plural(one.gpu_files, 'GPU')}, but torch finds none: {built}",
         "install torch for CUDA and a driver that fits, or use --device cpu", True),
        (cuda and not one.gpu_files and not one.num_gpus, "torch finds no GPU",
         "use --device cpu, or give the container its GPUs", True),
        (device != "cpu" and 0 < one.num_gpus < one.local_size,
         f"{plural(one.local_size, 'process', 'es')}, but {plural(one.num_gpus, 'GPU')}",
         f"start at most {one.num_gpus} with --nproc-per-node, or use --device cpu", True),
        (device != "cpu" and bool(busy),
         f"{100 * max([r.gpu_used or 0 for r in busy], default=0):.0f}% of the memory of GPU "
         f"{', '.join(str(r.local_rank) for r in busy)} is in use",
         "end the other program (nvidia-smi lists it)", False),
        ("ACTIVE" in one.alike.get("InfiniBand ports", "") and 0 <= one.locked_memory < 2**30,
         f"it may lock {one.locked_memory / 2**20:.0f} MiB of memory, and InfiniBand needs more",
         "ulimit -l unlimited, or for a container --ulimit memlock=-1", False),
        (several and not one.failed and local and "GLOO_SOCKET_IFNAME" not in one.alike,
         f"its name {resolves}, so gloo would listen where other machines cannot reach it",
         "set GLOO_SOCKET_IFNAME to the network interface, such as eth0, or correct /etc/hosts", True),
        (abs(ahead) > MAX_CLOCK, f"its clock is {abs(ahead):,.1f} s {'ahead of' if ahead > 0 else 'behind'} rank 0's",
         "synchronize the clocks (chronyc makestep, or timedatectl)", False),
        (bool(one.unwritable), f"the output folder cannot be written: {one.unwritable}",
         "choose another one with --out", False),
        (one.free is not None and one.free < min_free,
         f"{one.folder} has {(one.free or 0) / GB:.1f} GB free, and the run needs {min_free / GB:g} GB",
         "delete old runs, or choose another folder with --out (--min-free changes this)", False),
        (one.sees_mark is False, f"{one.folder} is not the folder of rank 0",
         "choose one on a shared file system with --out: all ranks read checkpoints there", False),
        (one.shm is not None and one.shm < 2**30,
         f"/dev/shm has {(one.shm or 0) / 2**20:.0f} MiB free, and NCCL and CPU ranks need 1 GiB",
         "remove old files there, or start the container with --shm-size=8g", False),
        (files < need, f"a process may open {files:,} files, and {plural(world_size, 'rank')} need {need:,}",
         f"ulimit -n {max(65536, need)}, or for a container --ulimit nofile=1048576", False),
    ]  # fmt: skip
    return ((what, way_out, stops) for wrong, what, way_out, stops in rows if wrong)


# ---- links ----


@dataclass(frozen=True, slots=True)
class Kind:
    """Links within machines, or between them, and their usual speed."""

    name: str
    links: tuple[LinkSpeed, ...]
    usual: float


def kinds_of(links: Sequence[LinkSpeed], machines: Sequence[Machine]) -> list[Kind]:
    """The kinds that exist: "within a machine", "between machines"."""
    home = home_of(machines)
    inner = tuple(link for link in links if home[link.source] == home[link.to])
    outer = tuple(link for link in links if home[link.source] != home[link.to])
    kinds = [("within a machine", inner, lambda rank: rank), ("between machines", outer, home.__getitem__)]
    return [Kind(name, some, _usual(some, place)) for name, some, place in kinds if some]


def home_of(machines: Sequence[Machine]) -> dict[int, str]:
    """The name of each rank's machine."""
    return {one.rank: machine.name for machine in machines for one in machine.ranks}


def _usual(links: Iterable[LinkSpeed], place: Callable[[int], Hashable]) -> float:
    """The median over places of the median of their links.

    Of three machines, one slow machine makes four of the six links slow; but two of the three machines have a link
    that is not. So the higher median counts within a place.
    """
    speeds: dict[Hashable, list[float]] = {}
    for link in links:
        for rank in (link.source, link.to):
            speeds.setdefault(place(rank), []).append(link.speed)
    return statistics.median_high(statistics.median_high(some) for some in speeds.values())


def find_link_problems(links: Sequence[LinkSpeed], machines: Sequence[Machine]) -> list[Problem]:
    """Slow links."""
    home = home_of(machines)
    return [problem for kind in kinds_of(links, machines) for problem in _slow(kind, home)]


def _culprits(link: LinkSpeed, home: Mapping[int, str]) -> list[tuple[str, Hashable, tuple[str, ...]]]:
    """What may be slow as a whole if this link is, largest first, each with the other end and the machines to blame."""
    source, to = home[link.source], home[link.to]
    return [
        (f"{source} -> all other machines", to, (source,)),
        (f"all other machines -> {to}", source, (to,)),
        (f"{source} -> {to}" if source != to else f"within {to}", (link.source, link.to), (source, to)),
        (f"rank {link.source} of {source} -> all ranks", link.to, (source,)),
        (f"all ranks -> rank {link.to} of {to}", link.source, (to,)),
        (f"rank {link.source} on {source} -> rank {link.to} on {to}", None, (source, to)),
    ]


def _slow(kind: Kind, home: Mapping[int, str]) -> Iterator[Problem]:
    left = {link for link in kind.links if link.speed < SLOW * kind.usual}
    for level in range(6):
        groups: dict[tuple[str, tuple[str, ...]], dict[LinkSpeed, Hashable]] = {}
        for link in kind.links:
            name, other, blamed = _culprits(link, home)[level]
            groups.setdefault((name, blamed), {})[link] = other
        for (name, blamed), group in groups.items():  # with several other ends, so that it is not one of them
            if (level == 5 or len({*group.values()}) > 1) and left.issuperset(group):
                speed = statistics.median(link.speed for link in group)
                many = f" (median of {len(group)} links)" if len(group) > 1 else ""
                found = f"{speed / GB:.3g} GB/s{many}, and {kind.usual / GB:.3g} GB/s is usual {kind.name}"
                yield Problem(name, found, _WAYS_OUT[kind.name], False, blamed)
                alike = SLOW * statistics.median_high(link.speed for link in group)
                left -= {link for link in group if link.speed >= alike}


# ---- the report ----


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
    lines = [f"- {printable(problem, 1000)}" for problem in report.problems]
    verdict = [f"{plural(len(lines), 'problem')}:", *lines] if lines else ["No problems found."]
    return "\n\n".join([*parts, "\n".join(verdict)])


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
