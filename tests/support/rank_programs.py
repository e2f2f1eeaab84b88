"""Programs of several ranks that compute and meet in collectives, executed with known times.

A program is a list of pieces of computation and collectives. Ranks run it in order. A collective starts on each rank
when the rank arrives, and ends on all of them `duration` after the last one has arrived.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from moe_dualpipe.tools.profiler.matching import RankTransfers
from moe_dualpipe.tools.profiler.trace import Collective, DeviceEvent
from tests.support.traces import kernel, launch, write


@dataclass(frozen=True)
class Compute:
    us: dict[int, float]
    """The time on each rank."""


@dataclass(frozen=True)
class Join:
    kind: str
    group: str
    ranks: tuple[int, ...]
    duration: float


@dataclass
class Executed:
    events: dict[int, list[DeviceEvent]] = field(default_factory=lambda: defaultdict(list))
    waited: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """What each rank waited for others, by the definition of the program."""

    def comm(self, rank):
        return [event for event in self.events[rank] if event.collective is not None]


def execute(program, world, numbered=True):
    """Run the program on ranks 0 to world - 1. numbered: record sequence numbers."""
    now = dict.fromkeys(range(world), 0.0)
    numbers = defaultdict(int)
    done = Executed()
    for item in program:
        if isinstance(item, Compute):
            for rank, us in item.us.items():
                done.events[rank].append(device_event("gemm", now[rank], now[rank] + us, "7"))
                now[rank] += us
            continue
        last = max(now[rank] for rank in item.ranks)
        number, numbers[item.ranks] = numbers[item.ranks], numbers[item.ranks] + 1
        for i, rank in enumerate(item.ranks):
            kind = ("send", "recv")[i] if item.kind == "p2p" else item.kind
            found = Collective(
                kind, item.group, item.group, item.ranks, len(item.ranks), 1000, 1000, "Float",
                number if numbered else None, item.ranks[1 - i] if item.kind == "p2p" else None,
            )  # fmt: skip
            done.events[rank].append(device_event(f"nccl_{kind}", now[rank], last + item.duration, "20", found))
            done.waited[rank] += last - now[rank]
            now[rank] = last + item.duration
    return done


def device_event(name, start, end, stream, collective=None):
    return DeviceEvent(name, "kernel", start, end, "0", stream, None, 1, 0, collective)


def rank_transfers(done, rank):
    return RankTransfers(done.comm(rank), min(event.start for event in done.events[rank]), rank=rank)


def write_ranks(done: Executed, folder: Path, ranks=None, offset=0.0) -> list[Path]:
    """Write the trace of each rank as torch.profiler exports it, launched long before it runs. Rank n's clock is
    n * offset ahead."""
    paths = []
    for rank in sorted(done.events) if ranks is None else ranks:
        events = []
        for number, event in enumerate(done.events[rank], start=1):
            shown = kernel(event.name, event.start, event.end - event.start, int(event.stream), number)
            shown["args"] |= _arguments(event.collective)
            events += [shown, launch(number, 0.01 * number - 1000, duration=0.004)]
        for event in events:
            event["ts"] += 5_000 + rank * offset
        about = {"rank": rank, "world_size": len(done.events)}
        host = "node" if not offset else f"node{rank}"
        paths.append(write(folder / f"rank{rank}.json", events, host_name=host, distributedInfo=about))
    return paths


def _arguments(collective: Collective | None):
    if collective is None:
        return {}
    found = {
        "Collective name": collective.name, "In msg nelems": collective.in_elems, "dtype": collective.dtype,
        "Out msg nelems": collective.out_elems, "Group size": collective.size, "Seq": collective.sequence,
        "Process Group Name": collective.group, "Process Group Description": collective.description,
        "Process Group Ranks": str([*collective.ranks]), "Dst Rank": collective.peer, "Src Rank": collective.peer,
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}
