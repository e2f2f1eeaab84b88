"""Check the machines of a run before it starts.

1. Each rank gathers facts, and the first rank of each machine looks for problems of the machine.
2. Rank 0 gets the facts through the rendezvous store, to which each rank has a TCP connection. It names missing ranks,
   and compares the facts.
3. Unless a problem stops the check, all ranks measure their links in a process group, and rank 0 compares the speeds.

A disk, a link or NCCL may block a thread forever. So a step that takes too long ends the process: see `watched`.
"""

import json
import os
import platform
import re
import resource
import secrets
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ... import __version__
from ...expert_parallel.gather import gather_objects
from ...health.report import end_process
from ...messages import describe, list_ranks, plural, printable
from ...runtime.groups import init_world, leave_store
from ...runtime.launch import Launch, count_gpus
from ..drawing.tables import markdown

GB = 10**9
SLOW = 0.5
"""A link is slow below this fraction of the usual speed of its kind."""
MAX_CLOCK = 5.0
"""Seconds by which clocks may differ."""
MESSAGES = 6
"""Messages that measure a direction of a link. Another one comes first, and opens the connection."""
_MARGIN = 5.0
"""Seconds that rank 0 may need for its answer, besides the time that it waits for other ranks."""
_WAY_OUT = "check this machine and the network between ranks: firewall, NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
_WAITING = "waiting for the other ranks"
_VERSIONS = ("Python", "torch", "triton", "CUDA", "NCCL", "driver", "moe-dualpipe")
_SETTING = re.compile(r"(NCCL|GLOO|TORCH_NCCL)_\w+|CUDA_DEVICE_MAX_CONNECTIONS")
_PRIVATE_SETTING = re.compile(r".*_IFNAME|NCCL_(IB_HCA|DEBUG.*|HOSTID|TOPO\w*|GRAPH\w*|.*_FILE)")
"""Settings that may differ between machines."""
_WAYS_OUT = {
    **dict.fromkeys(_VERSIONS, "install the same version on all machines"),
    "GPUs": "use equal machines: all ranks wait for the slowest one",
    "InfiniBand ports": "check cards and cables with ibstat",
    "number of processes": "start as many on each machine, with the same --nproc-per-node",
    "within a machine": "look for another program on it, and check its GPUs with nvidia-smi topo -m and dcgmi diag",
    "between machines": "check the cable, the switch port and the network card (nccl-tests measures pairs of machines)",
}
Link = tuple[int, int]
"""The rank that sends, and the rank that receives."""
Start = Callable[..., None]
"""Called before each step, with its name: see `watched`."""


@dataclass(frozen=True, slots=True)
class Problem:
    """machines: the hosts that may be at fault. stops: links cannot be measured before this problem is solved."""

    where: str
    what: str
    way_out: str
    stops: bool = False
    machines: Sequence[str] = ()

    def __str__(self) -> str:
        return f"{self.where}: {self.what}: {self.way_out}"


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What rank 0 knows about a rank.

    gpu: whether this rank has a GPU. alike: what should be equal on all ranks, by name: versions, settings of NCCL and
    gloo, GPUs, InfiniBand ports. free: bytes in the output folder. problems: those of its machine; the first rank of a
    machine has them.
    """

    rank: int
    host: str
    local_rank: int = 0
    gpu: bool = False
    alike: Mapping[str, str] = field(default_factory=dict)
    free: int | None = None
    problems: Sequence[Problem] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """world_size: the expected number of ranks. speeds: bytes per second. note: what was not measured, and why."""

    world_size: int
    device: str
    facts: Sequence[RankFacts]
    problems: Sequence[Problem]
    speeds: Mapping[Link, float] = field(default_factory=dict)
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Free disk space in bytes, speeds in bytes per second."""
        return {
            "world_size": self.world_size, "device": self.device, "passed": not self.problems, "note": self.note,
            "problems": [asdict(problem) for problem in self.problems],
            "ranks": [asdict(facts) for facts in self.facts],
            "links": [{"source": source, "to": to, "speed": speed} for (source, to), speed in self.speeds.items()],
        }  # fmt: skip

    def __str__(self) -> str:
        """Tables of machines and links, then one line for each problem."""
        host = {one.rank: one.host for one in self.facts}
        first = [one for one in self.facts if one.local_rank == 0]
        device = "GPUs" if self.device == "cuda" else "CPUs"
        parts = [f"{plural(len(first), 'machine')}, {plural(self.world_size, 'rank')}, {device}"]
        if first:
            rows = [["machine", "first rank", "GPUs", "output folder", "verdict"]]
            for one in first:
                blamed = sum(one.host in problem.machines for problem in self.problems)
                free = "-" if one.free is None else f"{one.free / GB:.1f} GB free"
                verdict = f"see {plural(blamed, 'problem')}" if blamed else "ok"
                rows.append([one.host, str(one.rank), one.alike.get("GPUs") or "none", free, verdict])
            versions = ", ".join(f"{name} {first[0].alike[name]}" for name in _VERSIONS if name in first[0].alike)
            parts += [markdown(rows), f"On {first[0].host}: {versions}"]
        if self.speeds:
            rows = [["links, GB/s", "number", "slowest", "median", "fastest", "slowest link"]]
            for kind, speeds, _ in kinds_of(self.speeds, host):
                ordered = sorted(speeds.values())
                numbers = [f"{speed / GB:.3g}" for speed in (ordered[0], statistics.median(ordered), ordered[-1])]
                slowest = " -> ".join(f"{rank} ({host[rank]})" for rank in min(speeds, key=speeds.__getitem__))
                rows.append([kind, f"{len(speeds):,}", *numbers, slowest])
            parts.append(markdown(rows))
        lines = [f"- {printable(problem, 1000)}" for problem in self.problems]
        verdict = f"{plural(len(lines), 'problem')}:" if lines else "No problems found."
        return "\n\n".join([*parts, *filter(None, [self.note]), "\n".join([verdict, *lines])])


# ---- machines ----


def gather_facts(launch: Launch, out: Path, min_free: int, device: str, start: Start) -> RankFacts:
    start("reading versions and devices")
    gpus = [torch.cuda.get_device_properties(i) for i in range(count_gpus())]
    alike = read_versions() | {
        "GPUs": count_kinds([f"{gpu.name}, {gpu.total_memory >> 30} GiB" for gpu in gpus]),
        "InfiniBand ports": infiniband_ports(),
        "number of processes": str(launch.local_world_size),
        **{name: value for name, value in sorted(os.environ.items()) if _SETTING.fullmatch(name)},
    }
    free, problems = None, list[Problem]()
    if launch.local_rank == 0:
        start(f"writing to {out}")
        folder = find_folder(out)
        free = shutil.disk_usage(folder).free
        rows = [*_folder_limits(folder, free, min_free), *_limits(launch, device, alike)]
        problems = [_problem(launch, row) for row in rows if row[0]]
    has_gpu = launch.local_rank < len(gpus)
    return RankFacts(launch.rank, socket.gethostname(), launch.local_rank, has_gpu, alike, free, problems)


def find_folder(out: Path) -> Path:
    """`out`, or its nearest parent that exists."""
    return next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())


def read_versions(driver: Path = Path("/proc/driver/nvidia/version")) -> dict[str, str]:
    found = {"Python": platform.python_version(), "torch": torch.__version__, "moe-dualpipe": __version__}
    with suppress(metadata.PackageNotFoundError):
        found["triton"] = metadata.version("triton")
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
        found["NCCL"] = ".".join(map(str, getattr(torch.cuda, "nccl").version()))  # noqa: B009 - no type stub
    if match := re.search(r"Module.*?\s(\d+\.\d[\d.]*)\s", f"{_read(driver)}\n"):
        found["driver"] = match[1]
    return found


def infiniband_ports(devices: Path = Path("/sys/class/infiniband")) -> str:
    """Example: "8 x ACTIVE, 400 Gb/sec (4X NDR)"."""
    ports = devices.glob("*/ports/*")
    return count_kinds([f"{_read(port / 'state').partition(':')[2].strip()}, {_read(port / 'rate')}" for port in ports])


def count_kinds(names: Sequence[str]) -> str:
    """Example: ["A", "B", "A"] -> "2 x A and 1 x B"."""
    return " and ".join(f"{number} x {name}" for name, number in sorted(Counter(names).items()))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


Limit = tuple[bool, str, str, bool]
"""Whether it is exceeded, what is wrong, the way out, and whether links cannot be measured before it is solved."""


def _folder_limits(folder: Path, free: int, min_free: int) -> list[Limit]:
    unwritable = ""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        unwritable = describe(error)
    return [
        (bool(unwritable), f"the output folder cannot be written: {unwritable}",
         "choose another one with --out", False),
        (free < min_free, f"{folder} has {free / GB:.1f} GB free, and the run needs {min_free / GB:g} GB",
         "delete old runs, or choose another folder with --out (--min-free changes this)", False),
    ]  # fmt: skip


def _limits(launch: Launch, device: str, alike: Mapping[str, str]) -> list[Limit]:
    """What this machine and its processes may lack. device: as typed, auto, cpu or cuda."""
    gpus, processes, address = count_gpus(), launch.local_world_size, ""
    hidden = len([*Path("/dev").glob("nvidia[0-9]*")]) if not gpus else 0
    memory = [torch.cuda.mem_get_info(i) for i in range(min(gpus, processes))]
    used = {i: 1 - free / total for i, (free, total) in enumerate(memory) if free < 0.9 * total}
    built = "its CUDA version needs another driver" if "CUDA" in alike else "it is built without CUDA"
    with suppress(OSError):
        address = str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    local = address in ("", "::1") or address.startswith("127.")
    resolves = f"resolves to {address}" if address else "does not resolve"
    shm = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 2**30
    locked, files = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE))
    # gloo opens a socket to each rank in each group, and NCCL several files for each GPU.
    need = max(512 + 8 * launch.world_size, 4096 if gpus else 0)
    return [
        (device != "cpu" and hidden > 0, f"{plural(hidden, 'GPU')}, but torch finds none: {built}",
         "install torch for CUDA and a driver that fits, or use --device cpu", True),
        (device == "cuda" and not hidden and not gpus, "torch finds no GPU",
         "use --device cpu, or give the container its GPUs", True),
        (device != "cpu" and 0 < gpus < processes, f"{plural(processes, 'process', 'es')}, but {plural(gpus, 'GPU')}",
         f"start at most {gpus} with --nproc-per-node, or use --device cpu", True),
        (device != "cpu" and bool(used),
         f"{100 * max(used.values(), default=0):.0f}% of the memory of GPU {', '.join(map(str, used))} is in use",
         "end the other program (nvidia-smi lists it)", False),
        ("ACTIVE" in alike["InfiniBand ports"] and 0 <= locked < 2**30,
         f"it may lock {locked / 2**20:.0f} MiB of memory, and InfiniBand needs more",
         "ulimit -l unlimited, or for a container --ulimit memlock=-1", False),
        (launch.world_size > processes and local and "GLOO_SOCKET_IFNAME" not in alike,
         f"its name {resolves}, so gloo would listen where other machines cannot reach it",
         "set GLOO_SOCKET_IFNAME to the network interface, such as eth0, or correct /etc/hosts", True),
        (shm < 2**30, f"/dev/shm has {shm / 2**20:.0f} MiB free, and NCCL and CPU ranks need 1 GiB",
         "remove old files there, or start the container with --shm-size=8g", False),
        (0 <= files < need,
         f"a process may open {files:,} files, and {plural(launch.world_size, 'rank')} need {need:,}",
         f"ulimit -n {max(65536, need)}, or for a container --ulimit nofile=1048576", False),
    ]  # fmt: skip


def _problem(launch: Launch, limit: Limit) -> Problem:
    """The problem of this machine, which exceeds a limit."""
    _, what, way_out, stops = limit
    host, first = socket.gethostname(), launch.rank - launch.local_rank
    ranks = range(first, first + launch.local_world_size)
    return Problem(f"{host} ({list_ranks(ranks)})", what, way_out, stops, [host])


def find_differences(facts: Sequence[RankFacts]) -> Iterator[Problem]:
    """Ranks that differ from most ranks. In a tie, the first rank counts."""
    for name in dict.fromkeys(name for one in facts for name in one.alike if not _PRIVATE_SETTING.fullmatch(name)):
        values = {one.rank: one.alike.get(name, "") for one in facts}
        ((usual, number),) = Counter(values.values()).most_common(1)
        others: dict[tuple[str, str], list[int]] = {}
        for one in facts:
            if values[one.rank] != usual:
                others.setdefault((one.host, values[one.rank]), []).append(one.rank)
        for (host, value), ranks in others.items():
            what = f"{name} {value or 'none'}, but {usual or 'none'} on {plural(number, 'other rank')}"
            way_out = _WAYS_OUT.get(name, "set it to the same value on all machines")
            yield Problem(
                f"{host} ({list_ranks(ranks)})", what, way_out, name in ("torch", "NCCL", "moe-dualpipe"), [host]
            )


# ---- links ----


def rounds_of(machines: Sequence[Sequence[int]]) -> list[list[Link]]:
    """Rounds of disjoint pairs of ranks. Each pair is in one round. machines: the ranks of each machine.

    Each rank has a place: width times the number of its machine, plus its index there; width is a power of two. In a
    round, the places of all partners differ in the same bits. So the ranks of a machine all have partners on the same
    machine, and share its network card in the same way in each round: speeds of different rounds can be compared.

    Example: [[0, 1], [2, 3]] -> [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]].
    """
    width, most = (1 << (number - 1).bit_length() for number in (max(map(len, machines)), len(machines)))
    places = {m * width + i: rank for m, ranks in enumerate(machines) for i, rank in enumerate(ranks)}
    rounds = []
    for bits in range(1, width * most):
        partners = {rank: places[place ^ bits] for place, rank in places.items() if place ^ bits in places}
        rounds.append(sorted((a, b) for a, b in partners.items() if a < b))
    return [pairs for pairs in rounds if pairs]


def measure_links(launch: Launch, device: torch.device, size: int, start: Start) -> dict[Link, float]:
    """The speeds of all links between ranks, in bytes per second. Collective, in the default process group.

    The sender times a message of `size` bytes and the answer, which is a few bytes. The fastest message counts: other
    programs only slow a link down.
    """
    rank, speeds, machines = launch.rank, dict[Link, float](), dict[int, list[int]]()
    for other, first in enumerate(gather_objects(rank - launch.local_rank)):
        machines.setdefault(first, []).append(other)
    message, answer = (torch.zeros(length, dtype=torch.uint8, device=device) for length in (size, 8))
    start("first operation of all ranks")
    dist.all_reduce(answer)  # connects all ranks
    rounds = rounds_of([*machines.values()])
    for number, pairs in enumerate(rounds):
        for forward in (True, False):
            start(f"{_WAITING} before round {number + 1} of {len(rounds)}")
            dist.all_reduce(torch.zeros(1))  # on the CPU, with gloo
            for source, to in (pair if forward else pair[::-1] for pair in pairs if rank in pair):
                start(f"rank {source} -> rank {to}")
                for sent in range(1 + MESSAGES):
                    begin = time.perf_counter()
                    transfer(message, source, to, rank)
                    transfer(answer, to, source, rank)
                    if sent and rank == source:
                        speed = size / (time.perf_counter() - begin)
                        speeds[source, to] = max(speed, speeds.get((source, to), 0.0))
    start(f"{_WAITING} at the end")
    return {link: speed for found in gather_objects(speeds) for link, speed in found.items()}


def transfer(tensor: torch.Tensor, source: int, to: int, rank: int) -> None:
    """Send or receive, and wait. In a batch, NCCL uses the connections of the group, and not one for each pair."""
    operation, peer = (dist.isend, to) if rank == source else (dist.irecv, source)
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer)]):
        work.wait()
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def kinds_of(speeds: Mapping[Link, float], host: Mapping[int, str]) -> Iterator[tuple[str, dict[Link, float], float]]:
    """The links within machines, and those between machines: their name, speeds and usual speed.

    The usual speed is the median over ranks or machines of the median of their links. Of three machines, a slow one
    slows four of six links, but two machines have a link that is not slow. So the higher median counts.
    """
    for name, between in (("within a machine", False), ("between machines", True)):
        links = {link: speed for link, speed in speeds.items() if (host[link[0]] != host[link[1]]) == between}
        of_place: dict[Hashable, list[float]] = {}
        for link, speed in links.items():
            for rank in link:
                of_place.setdefault(host[rank] if between else rank, []).append(speed)
        if links:
            yield name, links, statistics.median_high(map(statistics.median_high, of_place.values()))


def find_slow_links(speeds: Mapping[Link, float], host: Mapping[int, str]) -> Iterator[Problem]:
    """One bad cable makes many links slow. So slow links that share a machine, two machines or a rank are named once.

    A cause counts if all its links are slow and, unless it is a single link, have several other ends.
    """
    for kind, links, usual in kinds_of(speeds, host):
        left = {link for link, speed in links.items() if speed < SLOW * usual}
        for level in range(6):
            causes: dict[tuple[str, tuple[str, ...]], dict[Link, Hashable]] = {}
            for link in links:
                name, blamed, other_end = _causes(*link, host)[level]
                causes.setdefault((name, blamed), {})[link] = other_end
            for (name, blamed), ends in causes.items():
                if left.issuperset(ends) and (len({*ends.values()}) > 1 or level == 5):
                    many = f" (median of {len(ends)} links)" if len(ends) > 1 else ""
                    speed = statistics.median(links[link] for link in ends)
                    what = f"{speed / GB:.3g} GB/s{many}, and {usual / GB:.3g} GB/s is usual {kind}"
                    yield Problem(name, what, _WAYS_OUT[kind], False, blamed)
                    left -= ends.keys()


def _causes(source: int, to: int, host: Mapping[int, str]) -> list[tuple[str, tuple[str, ...], Hashable]]:
    """What may make a link slow, largest first: its name, the machines to blame, and the other end of the link."""
    a, b = host[source], host[to]
    return [
        (f"{a} -> all other machines", (a,), b),
        (f"all other machines -> {b}", (b,), a),
        (f"{a} -> {b}" if a != b else f"within {a}", (a, b), (source, to)),
        (f"rank {source} of {a} -> all ranks", (a,), to),
        (f"all ranks -> rank {to} of {b}", (b,), source),
        (f"rank {source} on {a} -> rank {to} on {b}", (a, b), None),
    ]


# ---- the check ----


def check_cluster(
    launch: Launch, out: Path = Path("runs"), size: int = 16 << 20, timeout: float = 60.0, min_free: int = 10 * GB,
    device: str = "auto",
) -> tuple[int, Report | None]:  # fmt: skip
    """Check this machine or, with several processes, all of them. Collective.

    Returns the exit code, and on rank 0 the report. out: the output folder. size: bytes of a message. timeout: seconds
    of a step, after which the process ends. min_free: bytes. device: auto, cpu or cuda. Raises ConnectionError if ranks
    are missing, or if a connection fails.
    """
    report = None
    with watched(f"rank {launch.rank} on {socket.gethostname()}", timeout) as start:
        own = gather_facts(launch, out, min_free, device, start)
        if launch.world_size == 1:
            note = "One process: links between ranks were not measured. torchrun starts more."
            report = Report(1, device_of([own], device), [own], own.problems, note=note)
            return int(bool(report.problems)), report
        start("connecting to the rendezvous store", 2 * timeout + _MARGIN)
        store = open_store(launch, timeout)
        store.set(f"facts/{launch.rank}", json.dumps(asdict(own)))
        start("waiting for rank 0", 2 * timeout + _MARGIN)
        if launch.rank == 0:
            facts = collect_facts(store, launch.world_size, timeout)
            problems = [*find_differences(facts), *(problem for one in facts for problem in one.problems)]
            problems.sort(key=lambda problem: not problem.stops)
            report = Report(launch.world_size, device_of(facts, device), facts, problems)
            if problems and problems[0].stops:
                report = replace(report, note="Links were not measured: first solve the problems below.")
            store.set("device", "" if report.note else report.device)
        store.wait(["device"], timedelta(seconds=2 * timeout))
        if kind := store.get("device").decode():
            start("creating the process group")
            init_world(device_of_rank(kind, launch), launch, 2 * timeout, store)  # `watched` ends the process before
            others = compare_with_rank_0(launch, out, start)
            speeds = measure_links(launch, device_of_rank(kind, launch), size, start)
            if report is not None:
                slow = find_slow_links(speeds, {one.rank: one.host for one in report.facts})
                report = replace(report, problems=[*report.problems, *others, *slow], speeds=speeds)
        start("leaving", timeout + 2 * _MARGIN)
        if report is not None:
            store.set("code", str(int(bool(report.problems))))
        code = int(store.get("code"))
        leave_store(store, launch.rank, launch.world_size, _MARGIN)
    return code, report


def device_of(facts: Sequence[RankFacts], wanted: str) -> str:
    if wanted != "auto":
        return wanted
    return "cuda" if all(one.gpu for one in facts) else "cpu"


def device_of_rank(kind: str, launch: Launch) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(launch.local_rank)
    return torch.device("cuda", launch.local_rank)


def open_store(launch: Launch, timeout: float) -> dist.Store:
    """The store at MASTER_ADDR:MASTER_PORT, which rank 0 creates unless torchrun has."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise RuntimeError("MASTER_ADDR and MASTER_PORT must be set, as torchrun does")
    creates = launch.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    wait = timedelta(seconds=timeout)
    store = dist.TCPStore(host, int(port), None, creates, timeout=wait, wait_for_workers=False)
    return dist.PrefixStore(f"check cluster/{launch.restarts}", store)


def collect_facts(store: dist.Store, world_size: int, timeout: float) -> list[RankFacts]:
    """The facts of all ranks. Raises ConnectionError if some ranks send none in time."""
    end = time.monotonic() + timeout
    while missing := [rank for rank in range(world_size) if not store.check([f"facts/{rank}"])]:
        if time.monotonic() > end:
            waited = f"waited {timeout:g} s for {len(missing)} of {world_size} ranks: {list_ranks(missing[:8])}"
            raise ConnectionError(f"{waited}: start them, and look for a firewall or errors on their machines")
        time.sleep(0.1)
    found = [json.loads(store.get(f"facts/{rank}")) for rank in range(world_size)]
    return [RankFacts(**one | {"problems": [Problem(**problem) for problem in one["problems"]]}) for one in found]


def compare_with_rank_0(launch: Launch, out: Path, start: Start) -> list[Problem]:
    """The problems of all machines whose clock or output folder is not that of rank 0. Collective."""
    start(f"{_WAITING} to compare clocks and folders")
    mark = find_folder(out) / f".check-cluster-{secrets.token_hex(8)}"
    if launch.rank == 0:
        with suppress(OSError):  # then the folder has a problem already
            mark.touch()
    mark, *_ = gather_objects(mark)
    clocks = gather_objects(time.time())
    ahead = clocks[launch.rank] - clocks[0]
    rows: list[Limit] = [
        (abs(ahead) > MAX_CLOCK, f"its clock is {abs(ahead):,.1f} s {'ahead of' if ahead > 0 else 'behind'} rank 0's",
         "synchronize the clocks (chronyc makestep, or timedatectl)", False),
        (not mark.exists(), f"the output folder of rank 0, {mark.parent}, is not shared with this machine",
         "choose one on a shared file system with --out: all ranks read checkpoints there", False),
    ]  # fmt: skip
    found = gather_objects([_problem(launch, row) for row in rows if row[0] and launch.local_rank == 0])
    if launch.rank == 0:
        mark.unlink(missing_ok=True)
    return [problem for problems in found for problem in problems]


@contextmanager
def watched(where: str, timeout: float) -> Iterator[Start]:
    """In this context, the process ends if a step takes too long: nothing can stop a thread that is blocked in C++.

    Yields a function to call before each step, with its name and optionally other seconds than `timeout`. Raises
    ConnectionError for an error of torch: "rank 1 on b: creating the process group: Connection refused: check ...".
    """
    steps, left = [("starting", timeout, time.monotonic())], threading.Event()

    def start(name: str, seconds: float = timeout) -> None:
        steps.append((name, seconds, time.monotonic()))

    def watch() -> None:
        while not left.wait(0.02):
            name, seconds, since = steps[-1]
            if time.monotonic() > since + seconds:
                reason = f"no answer for {seconds:g} s: {_WAY_OUT}"
                end_process(1, f"moe-dualpipe: error: {where}: {name}: {reason}\n")

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield start
    except RuntimeError as error:
        # Without the place in gloo's source, its advice, and the C++ stack trace below the first line.
        reason = re.sub(r"^\[\S+:\d+\] |\. This is typically .*|\n.*", "", str(error).strip(), flags=re.DOTALL)
        raise ConnectionError(f"{where}: {steps[-1][0]}: {printable(reason, 300)}: {_WAY_OUT}") from None
    finally:
        left.set()
