"""The steps of a recording: which are analyzed, and the times of each.

Annotations of steps, such as "ProfilerStep#5", are on the host, which runs ahead of the device. On the device, a step
lasts from its first computation to the first computation of the next step, on the stream that computes most. A transfer
belongs to the step that launched it, other work to the step in which it starts. No event is cut in two.

By default, work before the first step, and work that was launched after the last step, is left out. A recording of a
single step is analyzed as a whole.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Literal, NamedTuple

from ...messages import plural, quoted
from .trace import CLOCK, DeviceEvent, HostEvent, Trace

_NAME = re.compile(r"(?:ProfilerStep|(?:train(?:ing)?[ _])?step|iter(?:ation)?)[ _#:=*]*(\d{1,9})$", re.IGNORECASE)
_RANGE = re.compile(r"(\d{0,9}):(\d{0,9})|(\d{1,9})")

Choice = range | Literal["all", "default"]
"""Numbers of steps. all: everything, including work outside of steps. default: all steps."""


class DeviceStep(NamedTuple):
    """A step on a device, in microseconds of the trace."""

    number: int
    start: float
    end: float
    """Infinite for the last step if nothing is computed after it."""
    launched: tuple[float, float]
    """From its start on the host to the start of the next step, or to its own end."""


class AnalyzedWindow(NamedTuple):
    """The analyzed part of one device's trace."""

    trace: Trace
    """All that the host did, and the events of the device in these steps."""
    steps: Sequence[DeviceStep]
    """The steps that are analyzed; () if none are recorded."""
    left_out: str = ""
    """A sentence: which steps are analyzed, and what is left out. "" if nothing is left out."""


def is_step(name: str) -> bool:
    """Whether an annotation is named after a step, such as "ProfilerStep#5", "step 5" or "iteration 5"."""
    return _NAME.match(name) is not None


def parse_steps(text: str | None) -> Choice:
    """Read "3:7" (without step 7), "3:", ":7", "3" or "all". Raises ValueError for another text."""
    if text is None or text == "all":
        return text or "default"
    found = _RANGE.fullmatch(text)
    if not found:
        raise ValueError(f"--steps {quoted(text)} is not a range of steps: use 3:7 (without step 7), 3:, :7, 3 or all")
    first, end, only = found.groups()
    chosen = range(int(only), int(only) + 1) if only else range(int(first or 0), int(end or 10**9))
    if not chosen:
        raise ValueError(f"--steps {text} has no step: the second number must be larger than the first")
    return chosen


def window_of(trace: Trace, choice: Choice) -> AnalyzedWindow:
    """Return the part that is analyzed of a trace of one device, which comes from `as_device`.

    Raises ValueError if steps are chosen that are not recorded.
    """
    events, steps = trace.device_events, _device_steps(trace)
    if isinstance(choice, range) and not steps:
        raise ValueError(
            "--steps: no steps are recorded: call step() of torch.profiler, or annotate each step, such as 'step 3'"
        )
    if choice == "all" or not steps or (choice == "default" and len(steps) == 1):
        return AnalyzedWindow(trace, steps)
    chosen = steps if choice == "default" else [step for step in steps if step.number in choice]
    if not chosen:
        raise ValueError(f"--steps: no work of device {events[0].device} is in these steps; recorded: {_span(steps)}")
    kept = [event for event in events if _belongs(event, trace, chosen)]
    outside = plural(len(events) - len(kept), "event")
    said = f"analyzed: {_span(chosen)} of {_span(steps)}"
    if choice == "default":
        said = f"analyzed: {_span(chosen)}, without {outside} outside of the steps (--steps all includes them)"
    return AnalyzedWindow(replace(trace, device_events=kept), chosen, said if len(kept) < len(events) else "")


def annotated_steps(trace: Trace, processes: Collection[str] = ()) -> list[tuple[int, HostEvent]]:
    """The annotated steps of these processes, or of all, with their numbers, in order.

    There are none if annotations overlap, or if their numbers do not grow.
    """
    found = trace.steps or [event for event in trace.annotations if is_step(event.name)]
    steps = sorted((e for e in found if e.thread[0] in processes or not processes), key=lambda event: event.start)
    numbers = [int(match[1]) if (match := _NAME.match(step.name)) else -1 for step in steps]
    in_order = -1 not in numbers and all(a < b for a, b in pairwise(numbers))
    apart = all(b.start >= a.end - CLOCK for a, b in pairwise(steps))
    return [*zip(numbers, steps, strict=True)] if in_order and apart else []


def _device_steps(trace: Trace) -> list[DeviceStep]:
    """The steps that computed something on the device."""
    events = trace.device_events
    launches = [trace.launch_of(event) for event in events]
    recorded = annotated_steps(trace, {launch.thread[0] for launch in launches if launch is not None})
    if not recorded:
        return []
    launched = any(launches)  # then work without a launch was launched before the recording
    busy: dict[str, float] = defaultdict(float)
    for event in events:
        busy[event.stream] += (event.end - event.start) * (event.kind == "compute")
    main = max(busy, key=lambda stream: busy[stream])
    edges = [*(step.start for _, step in recorded), recorded[-1][1].end]
    starts = [inf] * len(edges)  # of the first computation of each step, and of that after the last step
    for event, launch in zip(events, launches, strict=True):
        if event.stream == main and event.kind == "compute" and (launch or not launched):
            step = bisect_right(edges, launch.start if launch else event.start) - 1
            if step >= 0:
                starts[step] = min(starts[step], event.start)
    found = [i for i in range(len(recorded)) if starts[i] < inf]
    return [
        DeviceStep(recorded[i][0], starts[i], starts[then], (edges[i], edges[then]))
        for i, then in pairwise([*found, len(recorded)])
    ]


def _belongs(event: DeviceEvent, trace: Trace, steps: Sequence[DeviceStep]) -> bool:
    launch = trace.launch_of(event)
    if launch is not None and event.kind == "comm":
        return steps[0].launched[0] <= launch.start < steps[-1].launched[1]
    return steps[0].start <= event.start < steps[-1].end


def _span(steps: Sequence[DeviceStep]) -> str:
    first, last = steps[0].number, steps[-1].number
    return f"step {first}" if first == last else f"steps {first} to {last}"
