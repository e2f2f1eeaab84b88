"""How much communication a run could hide at most, with its segments in their order and of their measured lengths.

Two clocks tell the least time: a computation advances the first. A transfer starts on the second once it is launched
and earlier transfers have ended. A wait moves the first clock to the end of its transfer. What the first clock waits is
the least exposed time. A run has more: the host adds gaps between segments. docs/overlap.md derives what this means for
one layer.

The recording of a CPU has all of this. A recording of a GPU lacks the order in which streams wait, so it has no bound.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...overlap.labels import PREPARE, SIZES_WAIT, is_wait, without_wait
from .communication import NAMES
from .host import host_as_device
from .intervals import intervals_of, length_before, union
from .phases import Phases
from .trace import Trace

_SIZES = without_wait(SIZES_WAIT)


class Compute(NamedTuple):
    """A computation. Times are in any unit."""

    time: float


class Start(NamedTuple):
    """The launch of a transfer that takes `time`."""

    label: str
    time: float = 0.0


class Wait(NamedTuple):
    """A wait for the first transfer with this label that was not yet waited for."""

    label: str


Event = Compute | Start | Wait


def least_time(events: Iterable[Event]) -> float:
    """The shortest time of these events in this order, if transfers run one after another."""
    clock = link = 0.0
    arrives: dict[str, deque[float]] = defaultdict(deque)
    for event in events:
        match event:
            case Compute(time):
                clock += time
            case Start(label, time):
                link = max(link, clock) + time
                arrives[label].append(link)
            case Wait(label) if arrives[label]:
                clock = max(clock, arrives[label].popleft())
    return clock


def possible_share(events: Sequence[Event]) -> float | None:
    """The largest share of the communication that can be hidden; None without communication."""
    computing = sum(event.time for event in events if isinstance(event, Compute))
    sending = sum(event.time for event in events if isinstance(event, Start))
    return 1 - (least_time(events) - computing) / sending if sending else None


def recorded_events(trace: Trace) -> list[Event]:
    """What a recorded pair computed, sent and waited for, in microseconds; nothing if the device is not a CPU.

    Where transfers run at the same time, the later one counts from the end of the earlier one.
    """
    if trace.device_events:
        return []
    cpu = host_as_device(trace, NAMES)
    phases = Phases(cpu, NAMES)
    comm = sorted((e for e in cpu.device_events if NAMES.kind_of(e) == "comm"), key=lambda event: event.end)
    computing = union(intervals_of(event for event in cpu.device_events if NAMES.kind_of(event) == "compute"))
    marks: list[tuple[float, Event]] = [
        (one.start, Wait(without_wait(one.name))) for one in trace.annotations if is_wait(one.name)
    ]
    reached = 0.0
    for transfer in comm:
        label, launch = phases.name_of(transfer), cpu.launch_of(transfer) or transfer
        time = max(transfer.end - max(transfer.start, reached), 0.0)
        marks.append((launch.start, Start(_SIZES if label.startswith(PREPARE) else label, time)))
        reached = max(reached, transfer.end)
    marks.sort(key=lambda mark: mark[0])
    edges = np.array([-np.inf, *(time for time, _ in marks), np.inf])
    before = length_before(computing)(np.clip(edges, -1e18, 1e18))
    between = [Compute(float(end - start)) for start, end in pairwise(before)]
    pairs = zip(between, [*(event for _, event in marks), None], strict=True)
    return [event for pair in pairs for event in pair if event is not None]
