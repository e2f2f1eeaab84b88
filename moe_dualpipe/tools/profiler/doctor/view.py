"""One device of a trace, in the form that all causes share: its events and the host's calls, as arrays.

Events and calls are sorted by start. Times are in microseconds from the start of the first event.
"""

from functools import cached_property

import numpy as np

from ....overlap.labels import SUM_GRADIENTS, WEIGHTS, letter_of
from ..trace import CLOCK, Trace
from .calls import LONG_CALL, calls_of_cpu, calls_of_gpu, queued_waits
from .replay import Floats, Ints, Mask, previous_of

COMPUTE, COMM, COPY = range(3)
_KINDS = {"compute": COMPUTE, "comm": COMM, "copy": COPY}
_CHUNKS = {"F": "F", "B": "B", "I": "B", "W": "B"}
MOST_EVENTS = 300_000
"""Causes are searched among this many events, the first ones."""

_LATENCY = 10.0  # at most so much of a launch's latency, beyond the call itself, is taken for unavoidable
_FULL_QUEUE = 900  # launches block when about 1,000 are queued


class View:
    """In the graph of the device (dependencies.py), nodes are numbered: the events, the ends of waits, the calls."""

    def __init__(self, trace: Trace):
        """trace: from `as_device`, with the events of this device only."""
        every = sorted(trace.device_events, key=lambda event: (event.start, event.end))
        self.trace, self.events = trace, every[:MOST_EVENTS]
        self.is_cpu, self.origin = self.events[0].device == "cpu", self.events[0].start
        self.kind: Ints = np.array([_KINDS[event.kind] for event in self.events], np.int64)
        self.start: Floats = np.array([event.start for event in self.events]) - self.origin
        self.end: Floats = np.array([event.end for event in self.events]) - self.origin
        streams: dict[str, int] = {}
        self.stream: Ints = np.array([streams.setdefault(e.stream, len(streams)) for e in self.events], np.int64)
        # the annotation of each event's launch, "" without, and whether it is of the forward's or the backward's chunk
        self.labels = [found.name if (found := trace.annotation_of(event)) else "" for event in self.events]
        self.chunks = [_CHUNKS.get(letter_of(label) or "") for label in self.labels]
        # weight gradients, which transfers of activations do not need
        self.is_wgrad: Mask = np.array([letter_of(label) == WEIGHTS for label in self.labels], bool)
        transfers = np.flatnonzero(self.is_comm).tolist()
        calls = (calls_of_cpu if self.is_cpu else calls_of_gpu)(trace, self.events, transfers)
        moved = (call._replace(start=call.start - self.origin, end=call.end - self.origin) for call in calls)
        self.calls = sorted(moved, key=lambda call: call[1:3])
        self.call_starts: Floats = np.array([call.start for call in self.calls])
        self.call_ends: Floats = np.array([call.end for call in self.calls])
        # the call that launched each event, -1 if unknown
        of_correlation: dict[int | None, int] = {call.correlation: i for i, call in enumerate(self.calls)} | {None: -1}
        self.launch: Ints = np.array([of_correlation.get(event.correlation, -1) for event in self.events], np.int64)
        # how many waits for other streams the host queued before each event, -1 if no such call is recorded
        self.num_waits: Ints = np.array(queued_waits(trace, self.events, transfers), np.int64)
        # how long each event takes without waits for other ranks, as far as known; which rank joined last, or -1; and
        # the longest wait of any rank for it (joint.py)
        self.own_us: Floats = self.duration
        self.last: Ints = np.full(len(self.events), -1)
        self.longest_wait_us: Floats = np.zeros(len(self.events))

    @cached_property
    def is_comm(self) -> Mask:
        return self.kind == COMM

    @cached_property
    def has_labels(self) -> bool:
        """Whether the run labels its segments, or its sums of gradients."""
        return any(letter_of(label) or label.startswith(SUM_GRADIENTS) for label in self.labels)

    @property
    def window_us(self) -> float:
        return float(self.end.max())

    @property
    def duration(self) -> Floats:
        return self.end - self.start

    @cached_property
    def may_wait(self) -> Mask:
        """Whether the host may have queued a wait for another stream before each event."""
        return (self.num_waits != 0) | (self.launch < 0)

    @cached_property
    def launched(self) -> Floats:
        """When the launch of each event started; -inf if unknown."""
        return np.append(self.call_starts, -np.inf)[self.launch]

    @cached_property
    def launch_end(self) -> Floats:
        """When the launch of each event ended; infinite if unknown."""
        return np.append(self.call_ends, np.inf)[self.launch]

    @cached_property
    def latency(self) -> float:
        """The shortest usual time from the start of a launch to the start of its kernel."""
        known = self.launch >= 0
        if not known.any():
            return 0.0
        most = _LATENCY + np.median((self.launch_end - self.launched)[known])
        return float(np.clip(np.percentile((self.start - self.launched)[known], 5), 0.0, most))

    @cached_property
    def previous(self) -> Ints:
        """The event before each event on its stream; -1 for the first."""
        return previous_of(self.stream)

    @cached_property
    def free(self) -> Floats:
        """When the stream of each event was free; -inf for the first."""
        return np.where(self.previous >= 0, self.end[self.previous], -np.inf)

    @cached_property
    def ready(self) -> Floats:
        """When each event was launched and its stream was free."""
        return np.minimum(np.maximum(self.free, self.launched + self.latency), self.start)

    @cached_property
    def awaited(self) -> Ints:
        """The event that each call waited for; -1 for none.

        On a GPU: what ended last before the call returned. Launches wait while the queue is full.
        """
        if self.is_cpu:
            return np.array([call.awaits for call in self.calls], np.int64)
        start, end, number = self.call_starts, self.call_ends, np.arange(len(self.calls))
        queued = np.searchsorted(np.sort(self.launch), number) - np.searchsorted(np.sort(self.start), start)
        full = np.isin(number, self.launch) & (queued >= _FULL_QUEUE) & (end - start > LONG_CALL)
        by_end = np.argsort(self.end, kind="stable")
        awaited = np.full(len(self.calls), -1, np.int64)
        sync = np.array([call.sync for call in self.calls], bool)
        for call in np.flatnonzero(full | sync).tolist():
            first, last = np.searchsorted(self.end[by_end], [start[call] + CLOCK, end[call] + CLOCK], side="right")
            launched = by_end[first:last][self.launch[by_end[first:last]] <= call]
            awaited[call] = launched[-1] if len(launched) else -1
        return awaited

    @cached_property
    def waiting_calls(self) -> Ints:
        """The calls that waited for an event."""
        return np.flatnonzero(self.awaited >= 0)

    @property
    def wait_nodes(self) -> Ints:
        """The node of the end of each of `waiting_calls`."""
        return len(self.events) + np.arange(len(self.waiting_calls))

    @property
    def call_nodes(self) -> Ints:
        """The node of each call."""
        return len(self.events) + len(self.waiting_calls) + np.arange(len(self.calls))
