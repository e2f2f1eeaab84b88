"""Programs of several ranks that compute and meet in collectives, executed with known times.

A program is a list of pieces of computation and collectives. Ranks run it in order. A collective starts on each rank
when the rank arrives, and ends on all of them `duration` after the last one has arrived.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from moe_dualpipe.tools.profiler.matching import RankTransfers
from moe_dualpipe.tools.profiler.trace import Collective, DeviceEvent
from tests.support.traces import annotation, kernel, launch, write


@dataclass(frozen=True)
class Compute:
    us: dict[int, float] | float
    """The time on each rank, or on all ranks."""
    name: str = "gemm"
    phase: str = ""


@dataclass(frozen=True)
class Join:
    kind: str
    group: str
    ranks: tuple[int, ...]
    duration: float = 10.0
    elements: dict[int, int] | int = 1000
    phase: str = ""


@dataclass(frozen=True)
class Idle:
    """The host launches everything that follows after this time only."""

    us: dict[int, float] | float


@dataclass
class Executed:
    events: dict[int, list[DeviceEvent]] = field(default_factory=lambda: defaultdict(list))
    launches: dict[int, list[tuple[float, str]]] = field(default_factory=lambda: defaultdict(list))
    """When the host launched each event, and in which phase. Without `Idle`, it is far ahead of the device."""
    waited: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """What each rank waited for others, by the definition of the program."""
    end: float = 0.0

    def comm(self, rank):
        return [event for event in self.events[rank] if event.collective is not None]

    def compute(self, rank):
        return [event for event in self.events[rank] if event.collective is None]


def execute(program, world, numbered=True, with_ranks=True):
    """Run the program on ranks 0 to world - 1. numbered: record sequence numbers."""
    now = dict.fromkeys(range(world), 0.0)
    host = dict.fromkeys(range(world), -1000.0)
    numbers = defaultdict(int)
    done = Executed()
    for item in program:
        if isinstance(item, Join):
            last = max(now[rank] for rank in item.ranks)
            number, numbers[item.ranks] = numbers[item.ranks], numbers[item.ranks] + 1
            for i, rank in enumerate(item.ranks):
                elements = item.elements if isinstance(item.elements, int) else item.elements[rank]
                kind = ("send", "recv")[i] if item.kind == "p2p" else item.kind
                found = Collective(
                    kind, item.group, item.group, item.ranks if with_ranks else (), len(item.ranks), elements, elements,
                    "Float", number if numbered else None, item.ranks[1 - i] if item.kind == "p2p" else None,
                )  # fmt: skip
                done.events[rank].append(device_event(f"nccl_{kind}", now[rank], last + item.duration, "20", found))
                done.launches[rank].append((host[rank], item.phase))
                host[rank] += 0.01
                done.waited[rank] += last - now[rank]
                now[rank] = last + item.duration
        else:
            for rank in now:
                us = item.us.get(rank, 0.0) if isinstance(item.us, dict) else item.us
                if isinstance(item, Compute) and us:
                    done.events[rank].append(device_event(item.name, now[rank], now[rank] + us, "7"))
                    done.launches[rank].append((host[rank], item.phase))
                    host[rank] += 0.01
                now[rank] += us
                if isinstance(item, Idle) and us:
                    host[rank] = now[rank] - 0.01
    done.end = max(now.values())
    return done


def device_event(name, start, end, stream, collective=None):
    return DeviceEvent(name, "kernel", start, end, "0", stream, None, 1, 0, collective)


def seen_by(events, offset=0.0, drift=0.0):
    """The events as a clock shows them that is `offset` ahead and runs faster by `drift`."""
    shown = lambda time: time * (1 + drift) + offset  # noqa: E731
    return [event._replace(start=shown(event.start), end=shown(event.end)) for event in events]


def rank_transfers(done, rank, offset=0.0, drift=0.0, **more):
    comm = seen_by(done.comm(rank), offset, drift)
    start = min(event.start for event in seen_by(done.events[rank], offset, drift))
    return RankTransfers(comm, start, rank=rank, **more)


def write_ranks(done: Executed, folder: Path, ranks=None, offset=0.0, **more) -> list[Path]:
    """Write the trace of each rank as torch.profiler exports it. Rank n's clock is n * offset ahead."""
    paths = []
    for rank in sorted(done.events) if ranks is None else ranks:
        events = []
        for number, (event, (launched, phase)) in enumerate(
            zip(done.events[rank], done.launches[rank], strict=True), start=1
        ):
            shown = kernel(event.name, event.start, event.end - event.start, int(event.stream), number)
            shown["args"] |= _arguments(event.collective)
            events += [shown, launch(number, launched, duration=0.004)]
            if phase:
                events.append(annotation(phase, launched, 0.006))
        for event in events:
            event["ts"] += 5_000 + rank * offset
        about = {"rank": rank, "world_size": len(done.events)}
        host = "node" if not offset else f"node{rank}"
        paths.append(write(folder / f"rank{rank}.json", events, host_name=host, distributedInfo=about, **more))
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
