"""Find the training steps in a rank's recording, and the time of each action of the pipeline.

The training loop annotates steps and STEP_PARTS; the executor annotates actions, such as "0F3". Times are in
microseconds.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from ...overlap.labels import STEP_PARTS, step_number
from ...schedule.actions import Action
from ...schedule.walk import Span
from .communication import NAMES
from .host import host_as_device
from .intervals import as_intervals, intervals_of, union, union_length
from .trace import DeviceEvent, HostEvent, Trace, TraceError


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank. All ranks count times from the same moment."""

    number: int
    start: float
    end: float
    spans: tuple[Span, ...]
    """Each action, from the start of its first computation to the end of its last one."""
    waiting: float
    """Time in the spans without computation: exposed expert communication, and Python."""
    parts: Mapping[str, tuple[float, float]]
    """Start and end of each of STEP_PARTS that launched work."""


def recorded_steps(trace: Trace, actions: Sequence[Action], since_us: float = 0.0) -> list[Step]:
    """Return the steps of a rank that runs `actions` in each step. Raises TraceError if the trace lacks an action.

    since_us: the origin of the returned times, on the clock of the host: when all ranks left the same barrier.
    """
    trace = host_as_device(trace, NAMES)
    texts = {str(action): action for action in actions}
    annotations = [event for event in trace.annotations if event.name in texts or event.name in STEP_PARTS]
    around = trace.innermost_around(annotations)
    launched: dict[HostEvent, list[DeviceEvent]] = defaultdict(list)
    for event in trace.device_events:
        if event.correlation in around:
            launched[around[event.correlation]].append(event)
    steps, by = [], trace.base_us - since_us
    found = (event for event in trace.annotations if step_number(event.name) is not None)
    for step in sorted(found, key=lambda event: event.start):
        inside = sorted((a for a in annotations if step.start <= a.start < step.end), key=lambda a: a.start)
        computed = {a: [e for e in launched[a] if NAMES.kind_of(e) != "comm"] for a in inside if a.name in texts}
        if [texts[annotation.name] for annotation in computed] != list(actions) or not all(computed.values()):
            raise TraceError(f"the recording of {step.name} lacks actions of the schedule")
        extents = _in_turns(map(_extent, computed.values()))
        compute = union(intervals_of(event for events in computed.values() for event in events))
        waiting = union_length(union(as_intervals(extents))) - union_length(compute)
        spans = (Span(action, a + by, b + by) for action, (a, b) in zip(actions, extents, strict=True))
        ends = {a.name: _extent(launched[a]) for a in inside if a.name in STEP_PARTS and launched[a]}
        parts = {part: (start + by, end + by) for part, (start, end) in ends.items()}
        steps.append(Step(step_number(step.name) or 0, step.start + by, step.end + by, tuple(spans), waiting, parts))
    return steps


def _extent(events: Sequence[DeviceEvent]) -> tuple[float, float]:
    return min(event.start for event in events), max(event.end for event in events)


def _in_turns(extents: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Move the start of each extent after the end of the previous one. On a GPU they can overlap: a side stream can
    still pack the rows of an action when the next action starts."""
    turns, free = [], -inf
    for start, end in extents:
        start = max(start, free)
        free = max(start, end)
        turns.append((start, free))
    return turns
