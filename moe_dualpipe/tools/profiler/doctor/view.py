"""One device of a trace, in the form that all causes share: events with their kinds, labels and launches, and calls."""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from ....overlap.labels import WEIGHTS, letter_of
from ..trace import WAITS, DeviceEvent, Trace
from .replay import Floats, Ints, Mask

COMPUTE, COMM, COPY = range(3)
_KINDS = {"compute": COMPUTE, "comm": COMM, "copy": COPY}
_CHUNKS = {"F": "F", "B": "B", "I": "B", "W": "B"}
MOST_EVENTS = 300_000
"""Causes are searched among this many events, the first ones."""

WAIT_CALLS = re.compile(r"StreamWaitEvent")
_FREES = "cudaFree", "hipFree"  # wait, too
_LONG_CALL = 100.0  # microseconds; an ordinary launch takes 5 to 30
POLL, AT_ONCE, BLOCKED = "polling for a number", "wait at once", "wait"
"""Names of waits that are not calls: a host that polls; a thread in the segment that started the transfer; another."""
_LEAST_POLL = 1000.0  # microseconds; the host's own work between two calls is usually shorter
_SOON = 100.0  # microseconds from the end of the transfer until the host goes on
_LATENCY = 10.0  # at most so much of a launch's latency, beyond the call itself, is taken for unavoidable


class Call(NamedTuple):
    """A call of the host that launches work on the device or waits for it. Times from the start of the window."""

    name: str
    start: float
    end: float
    thread: tuple[str, str]
    correlation: int | None
    sync: bool
    """Whether it may wait for the device."""


@dataclass(frozen=True)
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
    num_waits: Ints
    """How many waits for other streams the host queued before each event; -1 if no such call is recorded."""
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

    @property
    def may_wait(self) -> Mask:
        """Whether the host may have queued a wait for another stream before each event."""
        return (self.num_waits != 0) | (self.launch < 0)

    @cached_property
    def call_starts(self) -> Floats:
        """When each call started; one number if there are no calls."""
        return np.array([call.start for call in self.calls] or [0.0])

    @cached_property
    def call_ends(self) -> Floats:
        return np.array([call.end for call in self.calls] or [0.0])

    @cached_property
    def latency(self) -> float:
        """The shortest usual time from the start of a launch to the start of its kernel."""
        known = self.launch >= 0
        if not known.any():
            return 0.0
        launch = self.launch[known]
        most = _LATENCY + np.median(self.call_ends[launch] - self.call_starts[launch])
        return float(np.clip(np.percentile(self.start[known] - self.call_starts[launch], 5), 0.0, most))

    @cached_property
    def launched(self) -> Floats:
        """When each event could start at the earliest after its launch; -inf if that is unknown."""
        return np.where(self.launch >= 0, self.call_starts[self.launch] + self.latency, -np.inf)

    @cached_property
    def previous(self) -> Ints:
        """The event before each event on its stream; -1 for the first."""
        order = np.argsort(self.stream, kind="stable")
        previous = np.full(len(order), -1, np.int64)
        same = self.stream[order[1:]] == self.stream[order[:-1]]
        previous[order[1:][same]] = order[:-1][same]
        return previous

    @cached_property
    def free(self) -> Floats:
        """When the stream of each event was free; -inf for the first."""
        return np.where(self.previous >= 0, self.end[self.previous], -np.inf)

    @cached_property
    def ready(self) -> Floats:
        """When each event was launched and its stream was free."""
        return np.minimum(np.maximum(self.free, self.launched), self.start)


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
    return View(
        device=device, origin=origin, events=events, kind=kind,
        start=np.array([event.start for event in events]) - origin,
        end=np.array([event.end for event in events]) - origin,
        stream=np.array([numbers.setdefault(event.stream, len(numbers)) for event in events], np.int64),
        labels=labels, letters=[_CHUNKS.get(letter_of(label) or "") for label in labels],
        is_wgrad=np.array([letter_of(label) == WEIGHTS for label in labels], bool),
        calls=calls, launch=launch, num_waits=_num_waits(trace, calls, launch, kind, origin),
        queues=trace.queues,
    )  # fmt: skip


def _calls(trace: Trace, events: Sequence[DeviceEvent], origin: float) -> list[Call]:
    """The calls that launched `events`, and those that may wait, on the same threads."""
    ends = {event.correlation: event.end for event in sorted(events, key=attrgetter("end"))}
    last = max((event.end for event in events), default=0.0)
    threads = {trace.launches[number].thread for number in ends if number in trace.launches}
    found = []
    for number, call in trace.launches.items():
        launches, waits = number in ends, call.name in _FREES or WAITS.search(call.name) is not None
        # a call that outlasts its own kernel or copy waited for it, as for pageable memory
        blocks = launches and call.end >= ends[number] and call.end - call.start > _LONG_CALL
        sync = blocks or (waits and call.thread in threads)
        if (sync or launches) and call.start < last:
            found.append(Call(call.name, call.start - origin, call.end - origin, call.thread, number, sync))
    return sorted(found, key=lambda call: (call.start, call.end))


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
    queued = [
        (other.start - origin, -1, other.thread) for other in trace.launches.values() if WAIT_CALLS.search(other.name)
    ]
    if not queued:
        return np.full(len(launch), -1)
    comm_calls = {int(number) for number in launch[kind == COMM]}
    queued += [
        (calls[number].start, number, calls[number].thread) for number in np.unique(launch[launch >= 0]).tolist()
    ]
    pending: dict[tuple[str, str], int] = defaultdict(int)
    waits = np.zeros(len(calls) + 1, np.int64)  # the last one is for events without a launch
    for _, number, thread in sorted(queued):
        if number < 0:
            pending[thread] += 1
            continue
        is_comm = number in comm_calls
        waits[number] = min(pending[thread], 1) if is_comm else pending[thread]
        pending[thread] = max(pending[thread] - 1, 0) if is_comm else 0
    return waits[launch]
