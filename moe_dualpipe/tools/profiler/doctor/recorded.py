"""Inputs that a trace records: which work on one stream waits for which work on another."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from ..trace import DeviceEvent, Trace
from .replay import Ints


def recorded_inputs(
    trace: Trace, device: str, events: Sequence[DeviceEvent], launch: Ints, call_starts: Sequence[float]
) -> dict[int, list[int]] | None:  # fmt: skip
    """Return the events that each event waits for; None if the trace does not have them.

    A stream that waits for an event waits for the last work that was queued on the event's stream when the event was
    recorded. The first work that is queued on it afterwards has this input.

    launch: the call that launched each event, or -1. call_starts: on the clock of the trace.
    """
    waits = [wait for wait in trace.stream_waits if wait.device == device]
    if not waits:
        return None
    launched: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for i, call in enumerate(launch.tolist()):
        if call >= 0:
            launched[events[i].stream].append((call_starts[call], i))
    for queue in launched.values():
        queue.sort()
    found: dict[int, list[int]] = defaultdict(list)
    for wait in waits:
        if wait.awaited is None or wait.awaited == wait.stream:
            continue
        waited = _time_of(trace, wait.correlation, wait.time_us)
        before, after = launched[wait.awaited], launched[wait.stream]
        source = bisect_left(before, (_time_of(trace, wait.recorded, waited), -1)) - 1
        target = bisect_left(after, (waited, -1))
        if source >= 0 and target < len(after) and before[source][1] != after[target][1]:
            found[after[target][1]].append(before[source][1])
    return {target: list(dict.fromkeys(sources)) for target, sources in found.items()}


def _time_of(trace: Trace, correlation: int | None, otherwise: float) -> float:
    call = None if correlation is None else trace.launches.get(correlation)
    return otherwise if call is None else call.start
