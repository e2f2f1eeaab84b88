"""When each action of a pipeline's training step ran, from a rank's recording.

Annotations: of steps and STEP_PARTS by the training loop, of actions ("0F3") by the executor. Times are microseconds.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from ..overlap.labels import STEP_PARTS, is_for_experts, step_number
from ..schedule.actions import Action
from ..schedule.walk import Span
from .analyze import COMMUNICATION, intervals_of, kind_of
from .host import host_as_device
from .intervals import as_intervals, total, union
from .trace import DeviceEvent, HostEvent, Trace, TraceError


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank; times since the epoch, on the clock of its host."""

    number: int
    start: float
    end: float
    spans: tuple[Span, ...]
    """From the first to the last computation of each action."""
    waiting: float
    """How long nothing computed inside of the spans: exposed communication with experts, and Python."""
    parts: Mapping[str, tuple[float, float]]
    """From when to when work of each of STEP_PARTS ran; those that had none are not there."""


def recorded_steps(trace: Trace, actions: Sequence[Action]) -> list[Step]:
    """The steps of a rank that runs `actions` in each. Raises TraceError when the recording lacks some of them."""
    trace = host_as_device(trace, COMMUNICATION)
    texts = {str(action): action for action in actions}
    marks = [mark for mark in trace.annotations if mark.name in texts or mark.name in STEP_PARTS]
    around = trace.around(marks)
    works: dict[HostEvent, list[DeviceEvent]] = defaultdict(list)
    for work in trace.device_events:
        if work.correlation in around:
            works[around[work.correlation]].append(work)
    steps = []
    found = (mark for mark in trace.annotations if step_number(mark.name) is not None)
    for step in sorted(found, key=lambda mark: mark.start):
        inside = sorted((mark for mark in marks if step.start <= mark.start < step.end), key=lambda mark: mark.start)
        computed = {mark: [w for w in works[mark] if kind_of(w) != "comm"] for mark in inside if mark.name in texts}
        if [texts[mark.name] for mark in computed] != list(actions) or not all(computed.values()):
            raise TraceError(f"the recording of {step.name} lacks actions of the schedule")
        extents = _in_turns((min(w.start for w in same), max(w.end for w in same)) for same in computed.values())
        busy = union(as_intervals(extents))
        compute = union(intervals_of(work for same in computed.values() for work in same))
        parts = {
            mark.name: (
                min(work.start for work in works[mark]) + trace.base_us,
                max(work.end for work in works[mark]) + trace.base_us,
            )
            for mark in inside
            if mark.name in STEP_PARTS and works[mark]
        }
        spans = tuple(
            Span(action, start + trace.base_us, end + trace.base_us)
            for action, (start, end) in zip(actions, extents, strict=True)
        )
        waiting = total(busy) - total(compute)
        number = step_number(step.name) or 0
        steps.append(Step(number, step.start + trace.base_us, step.end + trace.base_us, spans, waiting, parts))
    return steps


def _in_turns(extents: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Each begins when those before it are through: on a GPU, a side stream may still pack what one of them sends."""
    turns, free = [], -inf
    for start, end in extents:
        start = max(start, free)
        free = max(start, end)
        turns.append((start, free))
    return turns


def only_expert_transfers(trace: Trace) -> Trace:
    """Without the communication that no dispatch or combine asked for.

    The transfers of a pipeline are on their way from when a rank is ready to when the other one is: they measure the
    schedule, not the overlap.
    """
    trace = host_as_device(trace, COMMUNICATION)

    def wanted(work: DeviceEvent) -> bool:
        if kind_of(work) != "comm":
            return True
        mark = trace.annotation_of(work)
        return mark is not None and is_for_experts(mark.name)

    return replace(trace, device_events=[work for work in trace.device_events if wanted(work)])


def align_clocks(steps: Sequence[Sequence[Step]], hosts: Sequence[str], moments: Sequence[float]) -> list[list[Step]]:
    """The steps of ranks on several hosts, with the clocks of the other hosts set by the first rank's.

    moments: the time at which each rank left one and the same barrier, by its own clock. Ranks of one host share it.
    """
    by_host: dict[str, list[float]] = defaultdict(list)
    for host, moment in zip(hosts, moments, strict=True):
        by_host[host].append(moment)
    ahead = {host: statistics.median(times) - statistics.median(by_host[hosts[0]]) for host, times in by_host.items()}
    return [[_earlier(step, ahead[host]) for step in same] for same, host in zip(steps, hosts, strict=True)]


def _earlier(step: Step, by: float) -> Step:
    spans = tuple(Span(span.action, span.start - by, span.end - by) for span in step.spans)
    parts = {part: (start - by, end - by) for part, (start, end) in step.parts.items()}
    return replace(step, start=step.start - by, end=step.end - by, spans=spans, parts=parts)
