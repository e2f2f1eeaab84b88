"""How much communication a run could hide at most, with its segments in their order and of their measured lengths.

The least time of these segments (overlap/pair_time.py) tells the least exposed time. A run has more of it: the host
adds gaps between segments. docs/overlap.md derives what this means for one layer.

The recording of a CPU has all of this. A recording of a GPU lacks the order in which streams wait, so it has no bound.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ...overlap.labels import PREPARE, SIZES_WAIT, is_wait, without_wait
from ...overlap.pair_time import Await, Begin, Computation, Event, least_time
from .communication import NAMES
from .host import host_as_device
from .intervals import intervals_of, length_before, union
from .phases import Phases
from .trace import Trace

_SIZES = without_wait(SIZES_WAIT)


def possible_share(events: Sequence[Event]) -> float | None:
    """The largest share of the communication that can be hidden; None without communication."""
    computing = sum(event.time for event in events if isinstance(event, Computation))
    sending = sum(event.time for event in events if isinstance(event, Begin))
    return 1 - (least_time(events) - computing) / sending if sending else None


def recorded_events(trace: Trace) -> list[Event]:
    """The computations, transfers and waits of a recorded pair, in microseconds; empty if the device is not a CPU.

    If two transfers overlap in time, the one that ends later counts from the end of the other one.
    """
    if trace.device_events:
        return []
    cpu = host_as_device(trace, NAMES)
    phases = Phases(cpu, NAMES)
    comm = sorted((e for e in cpu.device_events if NAMES.kind_of(e) == "comm"), key=lambda event: event.end)
    computing = union(intervals_of(event for event in cpu.device_events if NAMES.kind_of(event) == "compute"))
    marks: list[tuple[float, Event]] = [
        (one.start, Await(without_wait(one.name))) for one in trace.annotations if is_wait(one.name)
    ]
    reached = 0.0
    for transfer in comm:
        label, launch = phases.name_of(transfer), cpu.launch_of(transfer) or transfer
        time = max(transfer.end - max(transfer.start, reached), 0.0)
        marks.append((launch.start, Begin(_SIZES if label.startswith(PREPARE) else label, time)))
        reached = max(reached, transfer.end)
    marks.sort(key=lambda mark: mark[0])
    edges = np.array([-np.inf, *(time for time, _ in marks), np.inf])
    before = length_before(computing)(np.clip(edges, -1e18, 1e18))
    between = [Computation(float(end - start)) for start, end in pairwise(before)]
    pairs = zip(between, [*(event for _, event in marks), None], strict=True)
    return [event for pair in pairs for event in pair if event is not None]
