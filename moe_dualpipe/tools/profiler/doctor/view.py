"""One device of a trace, in the form that all causes share: events with their kinds, labels and launches, and calls."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ....overlap.labels import WEIGHTS, letter_of
from ..trace import DeviceEvent, Trace
from .recorded import recorded_inputs
from .replay import Floats, Ints, Mask

COMPUTE, COMM, COPY = range(3)
_KINDS = {"compute": COMPUTE, "comm": COMM, "copy": COPY}
MOST_EVENTS = 300_000
"""Causes are searched among this many events, the first ones."""

WAIT_CALLS = re.compile(r"StreamWaitEvent")
SYNC_CALLS = re.compile(r"Synchronize|Memcpy(?!.*Async)|^(cuda|hip)Free$")
_LONG_CALL = 100.0  # microseconds; an ordinary launch takes 5 to 30
POLL = "polling for a number"
"""The name of a wait that is not a call."""
_LEAST_POLL = 1000.0  # microseconds; the host's own work between two calls is usually shorter
_SOON = 100.0  # microseconds from the end of the transfer until the host goes on


class Call(NamedTuple):
    """A call of the host that launches work on the device or waits for it. Times from the start of the window."""

    name: str
    start: float
    end: float
    thread: tuple[str, str]
    correlation: int | None
    sync: bool
    """Whether it may wait for the device."""


@dataclass(frozen=True, slots=True)
class View:
    """Events and calls are sorted by start. Times are in microseconds from the start of the first event."""

    device: str
    origin: float
    events: list[DeviceEvent]
    kind: Ints
    start: Floats
    end: Floats
    stream: Ints
    labels: list[str]
    """The annotation of each event's launch; "" without."""
    letters: list[str | None]
    """The chunk of each event: "F" or "B"; None if unknown."""
    is_wgrad: Mask
    """Whether an event computes weight gradients, which transfers of activations do not need."""
    calls: list[Call]
    launch: Ints
    """The call that launched each event; -1 if unknown."""
    may_wait: Mask
    """Whether the host queued a wait for another stream before the event. True for all if no such call is recorded."""
    num_waits: Ints
    """The number of these waits; 0 if unknown."""
    waits_recorded: bool
    recorded_inputs: dict[int, list[int]] | None
    """The events on other streams that each event waits for. None if the trace does not say."""
    queues: int | None
    """Hardware queues (CUDA_DEVICE_MAX_CONNECTIONS), if recorded."""

    @property
    def window_us(self) -> float:
        return float(self.end.max()) if len(self.end) else 0.0

    @property
    def duration(self) -> Floats:
        return self.end - self.start

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"


def view_of(trace: Trace, device: str, kind_of: Callable[[DeviceEvent], str]) -> View:
    """kind_of: compute, comm or copy."""
    every = sorted((e for e in trace.device_events if e.device == device), key=lambda event: (event.start, event.end))
    events = every[:MOST_EVENTS]
    origin = events[0].start if events else 0.0
    labels = [found.name if (found := trace.annotation_of(event)) else "" for event in events]
    kind = np.array([_KINDS[kind_of(event)] for event in events], np.int64)
    numbers: dict[str, int] = {}
    calls = _with_polls(_calls(trace, events, origin), events, kind, origin) if device != "cpu" else []
    of_correlation = {call.correlation: i for i, call in enumerate(calls) if call.correlation is not None}
    launch = np.array(
        [-1 if event.correlation is None else of_correlation.get(event.correlation, -1) for event in events], np.int64
    )
    waits_recorded = any(WAIT_CALLS.search(other.name) for other in trace.launches.values())
    may_wait, num_waits = np.ones(len(events), bool), np.zeros(len(events), np.int64)
    if waits_recorded and device != "cpu":
        num_waits = _num_waits(trace, calls, launch, kind, origin)
        may_wait = (num_waits > 0) | (launch < 0)
    return View(
        device=device, origin=origin, events=events, kind=kind,
        start=np.array([event.start for event in events]) - origin,
        end=np.array([event.end for event in events]) - origin,
        stream=np.array([numbers.setdefault(event.stream, len(numbers)) for event in events], np.int64),
        labels=labels, letters=[_chunk(label) for label in labels],
        is_wgrad=np.array([letter_of(label) == WEIGHTS for label in labels], bool),
        calls=calls, launch=launch, may_wait=may_wait, num_waits=num_waits, waits_recorded=waits_recorded,
        recorded_inputs=recorded_inputs(trace, device, events, launch, [call.start + origin for call in calls]),
        queues=trace.queues,
    )  # fmt: skip


def _chunk(label: str) -> str | None:
    letter = letter_of(label)
    return "B" if letter in ("I", "W") else letter


def _calls(trace: Trace, events: Sequence[DeviceEvent], origin: float) -> list[Call]:
    """The calls that launched `events`, and those that may wait, on the same threads."""
    ends: dict[int, float] = {}
    for event in events:
        if event.correlation is not None:
            ends[event.correlation] = max(event.end, ends.get(event.correlation, event.end))
    last = max((event.end for event in events), default=0.0)
    threads = {trace.launches[number].thread for number in ends if number in trace.launches}
    found: dict[tuple[float, float, tuple[str, str], str], Call] = {}
    for number, call in trace.launches.items():
        # a call that outlasts its own kernel or copy waited for it, as for pageable memory
        blocks = number in ends and call.end >= ends[number] and call.end - call.start > _LONG_CALL
        sync = blocks or (call.thread in threads and SYNC_CALLS.search(call.name) is not None)
        if (sync or number in ends) and call.start < last:
            key = call.start, call.end, call.thread, call.name
            found[key] = Call(call.name, call.start - origin, call.end - origin, call.thread, number, sync)
    for other in trace.syncs:
        key = other.start, other.end, other.thread, other.name
        if other.thread in threads and other.start < last and key not in found:
            number = other.correlation
            found[key] = Call(other.name, other.start - origin, other.end - origin, other.thread, number, True)
    return sorted(found.values(), key=lambda call: (call.start, call.end))


def _with_polls(calls: list[Call], events: Sequence[DeviceEvent], kind: Ints, origin: float) -> list[Call]:
    """Add the waits in which the host reads a number in its memory until a kernel has written it.

    DeepEP's dispatch waits like this for the number of rows that will arrive (its README: "implicit CPU wait"). A trace
    shows a long time without calls. The next call follows the end of the transfer that its thread had launched last.
    """
    transfers = {events[i].correlation: events[i].end - origin for i in np.flatnonzero(kind == COMM).tolist()}
    found, latest, host_end = list[Call](), dict[tuple[str, str], int | None](), calls[0].end if calls else 0.0
    for call in calls:
        end = transfers.get(latest.get(call.thread), -np.inf)
        if call.start - host_end >= _LEAST_POLL and end <= call.start <= end + _SOON:
            found.append(Call(POLL, host_end, call.start, call.thread, None, True))
        host_end = max(host_end, call.end)
        latest[call.thread] = call.correlation
    return sorted([*calls, *found], key=lambda call: (call.start, call.end))


def _num_waits(trace: Trace, calls: Sequence[Call], launch: Ints, kind: Ints, origin: float) -> Ints:
    """The number of calls such as cudaStreamWaitEvent between the launch before and the launch of each event.

    A transfer uses up one such call, as in torch.distributed; others are left for the next launch.
    """
    comm_calls = {int(number) for number in launch[kind == COMM]}
    queued = [
        (other.start - origin, -1, other.thread) for other in trace.launches.values() if WAIT_CALLS.search(other.name)
    ]
    starts = {int(number) for number in launch if number >= 0}
    queued += [(calls[number].start, number, calls[number].thread) for number in starts]
    pending: dict[tuple[str, str], int] = {}
    waits = np.zeros(len(calls) + 1, np.int64)  # the last one is for events without a launch
    for _, number, thread in sorted(queued):
        count = pending.get(thread, 0)
        if number < 0:
            pending[thread] = count + 1
        else:
            waits[number] = min(count, 1) if number in comm_calls else count
            pending[thread] = max(count - 1, 0) if number in comm_calls else 0
    return waits[launch]
