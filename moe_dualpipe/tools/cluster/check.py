"""Check the machines of a run before it starts: are they equal, and are they and their links as fast as they should be?

Each rank measures a product and a copy in memory, then its link to one other rank at a time. A speed is slow if it is
far below the usual one of its kind, which a quarter of ranks or links reaches; the product of a known GPU, also if it
is far below the GPU's peak. So one machine is compared with its data sheet, and several are compared with each other.

A disk, a link or NCCL may block a thread forever. So a step that takes too long ends the process (`Deadline`).
"""

import os
import re
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from ... import __version__
from ...expert_parallel.gather import gather_objects
from ...health.report import Deadline
from ...health.watch import PATIENCE
from ...messages import list_ranks, plural, printable
from ...runtime.groups import create_group, leave_world
from ...runtime.known_gpus import peak_flops
from ...runtime.launch import Launch, device_of
from ...runtime.world import joined
from ..drawing.tables import markdown

GB, TFLOP = 10**9, 10**12
SLOW = 0.5
"""A speed is slow below this fraction of the usual one."""
REACHABLE = 0.6
"""The share of its peak that a GPU reaches in a large product."""
REPEATS = 6
"""Measurements of a speed. The fastest counts: other programs only slow it down."""
MOST_NAMED = 8
"""Slow ranks or links of a kind that get a line. The table has their number."""
MUST_AGREE = ("moe-dualpipe", "torch", "NCCL", "device")
"""Links between ranks that differ in these are not measured: the ranks may not understand each other."""
_SETTING = re.compile(r"(?!.*_IFNAME|NCCL_(IB_HCA|DEBUG|HOSTID|TOPO|GRAPH|\w*_FILE))((TORCH_)?NCCL|GLOO)_\w+")
"""Environment variables that should be equal on all machines."""
_WAY_OUT = "check this machine and the network between ranks: firewall, NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
_PRODUCT, _MEMORY = "product, TFLOP/s", "memory, GB/s"
_WITHIN, _BETWEEN = "links within a machine, GB/s", "links between machines, GB/s"
_KINDS = {
    _PRODUCT: "look for another program on it, and check clocks and power with nvidia-smi -q -d PERFORMANCE",
    _MEMORY: "look for another program on it, and check the GPU with dcgmi diag",
    _WITHIN: "look for another program there, and check the GPUs with nvidia-smi topo -m and dcgmi diag",
    _BETWEEN: "check the cable, the switch port and the network card (nccl-tests measures pairs of machines)",
}
"""Kinds of speeds, and what to do if one is slow."""
Speeds = Mapping[tuple[int, ...], float]
"""By (rank,), or by link: (the rank that sends, the rank that receives)."""
Start = Callable[[str], None]
"""Called before each step, with its name."""


class Problem(NamedTuple):
    where: str
    what: str
    way_out: str

    def __str__(self) -> str:
        return ": ".join(self)


class CheckedRank(NamedTuple):
    """What a rank knows about itself. alike: what should be equal on all ranks, by name."""

    rank: int
    host: str
    alike: Mapping[str, str]
    problems: Sequence[Problem] = ()


class ClusterReport(NamedTuple):
    """speeds: by kind, in the units of the kind. note: what was not measured, and why."""

    facts: Sequence[CheckedRank]
    problems: Sequence[Problem]
    speeds: Mapping[str, Speeds]
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Products in TFLOP/s, memory in GB/s, and links in bytes per second."""
        links = {**self.speeds[_WITHIN], **self.speeds[_BETWEEN]}
        own = {name: self.speeds[kind] for name, kind in (("product", _PRODUCT), ("memory", _MEMORY))}
        return {
            "world_size": len(self.facts), "device": self.facts[0].alike["device"], "passed": not self.problems,
            "note": self.note, "problems": [problem._asdict() for problem in self.problems],
            "ranks": [
                {"rank": one.rank, "host": one.host, "alike": one.alike}
                | {name: speeds.get((one.rank,)) for name, speeds in own.items()} for one in self.facts
            ],
            "links": [{"source": source, "to": to, "speed": speed * GB} for (source, to), speed in links.items()],
        }  # fmt: skip

    def __str__(self) -> str:
        """What the first rank has, a table of speeds, then one line for each problem."""
        hosts = {one.host for one in self.facts}
        alike = ", ".join(f"{name} {value}" for name, value in self.facts[0].alike.items())
        rows = [["speeds", "number", "slow", "slowest", "usual", "fastest", "slowest at"]]
        for kind, speeds in self.speeds.items():
            if speeds:
                usual, ordered = usual_speed(kind, speeds, self.facts), sorted(speeds, key=speeds.__getitem__)
                slow = sum(speed < SLOW * usual for speed in speeds.values())
                numbers = [f"{speed:.4g}" for speed in (speeds[ordered[0]], usual, speeds[ordered[-1]])]
                rows.append([kind, f"{len(speeds):,}", f"{slow:,}", *numbers, place(ordered[0], self.facts)])
        lines = [f"- {printable(problem, 1000)}" for problem in self.problems]
        verdict = "\n".join([f"{plural(len(lines), 'problem')}:" if lines else "No problems found.", *lines])
        title = (
            f"{plural(len(hosts), 'machine')}, {plural(len(self.facts), 'rank')}, each with {printable(alike, 2000)}"
        )
        return "\n\n".join(filter(None, [title, markdown(rows), self.note, verdict]))


# ---- facts ----


def gather_facts(launch: Launch, out: Path, min_free: int, device: torch.device) -> CheckedRank:
    """min_free: bytes that the nearest folder of `out` that exists should have."""
    alike = {"moe-dualpipe": __version__, "torch": torch.__version__, "device": device.type}
    alike["processes per machine"], used = str(launch.local_world_size), 0.0
    if device.type == "cuda":
        gpu, (free_memory, total) = torch.cuda.get_device_properties(device), torch.cuda.mem_get_info(device)
        nccl, used = getattr(torch.cuda, "nccl").version(), 1 - free_memory / total  # noqa: B009 - no type stub
        alike |= {"NCCL": ".".join(map(str, nccl)), "GPU": gpu.name, "GPU memory": f"{total >> 30} GiB"}
    alike |= {name: value for name, value in sorted(os.environ.items()) if _SETTING.fullmatch(name)}
    folder = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    free, writable = shutil.disk_usage(folder).free, folder.is_dir() and os.access(folder, os.W_OK)
    first, host = launch.local_rank == 0, socket.gethostname()
    faults = [
        (used > 0.1, f"{used:.0%} of the memory of its GPU is in use", "end the other program (nvidia-smi lists it)"),
        (first and not writable, f"{folder} cannot be written", "choose another output folder with --out"),
        (first and free < min_free, f"{folder} has {free / GB:.1f} GB free, and the run needs {min_free / GB:g} GB",
         "delete old runs, or choose another folder with --out (--min-free changes this)"),
    ]  # fmt: skip
    problems = [Problem(f"rank {launch.rank} on {host}", *texts) for wrong, *texts in faults if wrong]
    return CheckedRank(launch.rank, host, alike, problems)


def find_differences(facts: Sequence[CheckedRank]) -> Iterator[tuple[str, Problem]]:
    """What differs, by its name. In a tie, the first rank counts as usual."""
    for name in dict.fromkeys(name for one in facts for name in one.alike):
        values = [one.alike.get(name, "none") for one in facts]
        ((usual, number), *others) = Counter(values).most_common()
        for value, _ in others:
            ranks = [one.rank for one, own in zip(facts, values, strict=True) if own == value]
            hosts = ", ".join(dict.fromkeys(facts[rank].host for rank in ranks))
            what = f"{name} {value}, but {usual} on {plural(number, 'other rank')}"
            yield name, Problem(f"{hosts} ({list_ranks(ranks)})", what, "use the same on all machines")


# ---- speeds ----


def measure_machine(device: torch.device) -> tuple[float, float]:
    """TFLOP/s of a product, and GB/s of a copy in memory, of which each byte is read and written."""
    size, length, dtype = (16384, 2**29, torch.bfloat16) if device.type == "cuda" else (512, 2**25, torch.float32)
    used = {"x": torch.randn(size, size, device=device, dtype=dtype), "bytes": torch.ones(length, device=device) > 0}
    product, copy = (
        min(Timer(code, globals=used).timeit(2).mean for _ in range(REPEATS)) for code in ("x @ x", "bytes.clone()")
    )
    return 2 * size**3 / product / TFLOP, 2 * length / copy / GB


def measure_links(
    rank: int, message: torch.Tensor, group: dist.ProcessGroup | None, start: Start
) -> dict[tuple[int, ...], float]:
    """The speeds of the links from this rank, in GB/s. Collective.

    In a round, the partner of a rank is the one whose number differs in the same bits, so no two pairs share a rank.
    The sender times the message and its answer, which is a few bytes. The first message opens the connection, and does
    not count.
    """
    speeds, answer, size = dict[tuple[int, ...], float](), message[:8].clone(), dist.get_world_size()
    start("first operation of all ranks")
    dist.all_reduce(answer, group=group)  # connects all ranks
    for bits in range(1, 1 << (size - 1).bit_length()):
        low, high = sorted((rank, rank ^ bits))
        for source, to in ((low, high), (high, low)):
            start("waiting for the other ranks")
            dist.barrier()
            if high < size:
                start(f"rank {source} -> rank {to}")
                seconds = [exchange(message, answer, source, to, group) for _ in range(1 + REPEATS)]
                if rank == source:
                    speeds[source, to] = message.nbytes / min(seconds[1:]) / GB
    return speeds


def exchange(
    message: torch.Tensor, answer: torch.Tensor, source: int, to: int, group: dist.ProcessGroup | None
) -> float:
    """Send the message from `source`, and the answer from `to`. Returns the seconds. Collective over both ranks."""
    begin = time.perf_counter()
    for tensor, sender in ((message, source), (answer, to)):
        operation, peer = (dist.isend, source + to - sender) if sender == dist.get_rank() else (dist.irecv, sender)
        # In a batch, NCCL uses the connections of the group, and not one for each pair.
        for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, group)]):
            work.wait()
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - begin


def usual_speed(kind: str, speeds: Speeds, facts: Sequence[CheckedRank]) -> float:
    """The speed that a quarter reaches: of three machines, a slow one slows four of the six links between them."""
    peak = peak_flops(facts[0].alike.get("GPU", ""), torch.bfloat16) if kind == _PRODUCT else None
    return max(sorted(speeds.values())[len(speeds) * 3 // 4], REACHABLE * (peak or 0) / TFLOP)


def find_slow(kind: str, speeds: Speeds, facts: Sequence[CheckedRank]) -> Iterator[Problem]:
    """The slowest ranks or links of a kind, slowest first."""
    usual = usual_speed(kind, speeds, facts) if speeds else 0.0
    for ranks in sorted(speeds, key=speeds.__getitem__)[:MOST_NAMED]:
        if speeds[ranks] < SLOW * usual:
            what = f"{kind}: {speeds[ranks]:.4g}, and {usual:.4g} is usual"
            yield Problem(place(ranks, facts), what, _KINDS[kind])


def place(ranks: tuple[int, ...], facts: Sequence[CheckedRank]) -> str:
    """Example: "rank 1 on b -> rank 2 on c"."""
    return " -> ".join(f"rank {rank} on {facts[rank].host}" for rank in ranks)


# ---- the check ----


def check_cluster(
    launch: Launch, out: Path = Path("runs"), size: int = 16 << 20, timeout: float = 60.0, min_free: int = 10 * GB,
    device: str = "auto",
) -> ClusterReport:  # fmt: skip
    """Check this machine or, with several processes, all of them. Collective; the report is the same on all ranks.

    out: the output folder. size: bytes of a message. timeout: seconds to wait for other ranks; a step that takes 10 s
    more ends the process. min_free: bytes. device: auto, cpu or cuda. Raises ValueError, on one line, for a
    device that this machine lacks, for ranks that cannot be reached, and for links that fail.
    """
    own, step, where = device_of(device, launch), "", f"rank {launch.rank} on {socket.gethostname()}"
    if own.type == "cuda":
        torch.cuda.set_device(own)
    limit = timeout + PATIENCE  # the timeout is for torch, which says what it waited for
    with Deadline(limit, "") as deadline:

        def start(name: str) -> None:
            nonlocal step
            step = name
            deadline.text = f"error: {where}: {step}: no answer for {limit:g} s: {_WAY_OUT}"
            deadline.renew()

        try:
            start(f"reading versions and writing to {out}")
            facts = gather_facts(launch, out, min_free, own)
            start("joining the other ranks")
            with joined(torch.device("cpu"), launch, timeout):  # with gloo, which works if NCCL does not
                report = _check_world(facts, own, size, timeout, start)
                start("leaving")
                leave_world(timeout)
        except RuntimeError as error:
            # Without the place in gloo's source, its advice, and the C++ stack trace below the first line.
            reason = re.sub(
                r"^\[\S+:\d+\] |\. This is typically .*|\n.*", "", str(error).strip(), flags=re.DOTALL
            ).rstrip(".")
            raise ValueError(f"{where}: {step}: {printable(reason, 300)}: {_WAY_OUT}") from None
    return report


def _check_world(own: CheckedRank, device: torch.device, size: int, timeout: float, start: Start) -> ClusterReport:
    facts = gather_objects(own)
    differences, links, note = [*find_differences(facts)], {}, ""
    start("measuring a product and a copy")
    product, memory = measure_machine(device)
    if len(facts) == 1:
        note = "One process: links between ranks were not measured. torchrun starts more."
    elif any(name in MUST_AGREE for name, _ in differences):
        note = "Links were not measured: first solve the problems below."
    else:
        group = create_group(timeout=timeout, backend="nccl") if device.type == "cuda" else None
        links = measure_links(own.rank, torch.zeros(size, dtype=torch.uint8, device=device), group, start)
    start("waiting for the other ranks")
    mine = {_PRODUCT: {(own.rank,): product}, _MEMORY: {(own.rank,): memory}, _WITHIN: {}, _BETWEEN: {}}
    for link, speed in links.items():
        mine[_WITHIN if facts[link[0]].host == facts[link[1]].host else _BETWEEN][link] = speed
    parts = gather_objects(mine)
    speeds = {kind: {ranks: speed for part in parts for ranks, speed in part[kind].items()} for kind in _KINDS}
    problems = [*(problem for _, problem in differences), *(problem for one in facts for problem in one.problems)]
    slow = [problem for kind in _KINDS for problem in find_slow(kind, speeds[kind], facts)]
    return ClusterReport(facts, [*problems, *slow], speeds, note)
