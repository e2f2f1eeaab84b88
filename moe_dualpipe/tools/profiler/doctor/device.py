"""One device of a trace, in the form that all causes share: its events and the host's calls, as arrays, and its graph.

Events and calls are sorted by start. Times are in microseconds from the start of the first event.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from ....overlap.labels import SUM_GRADIENTS, WEIGHTS, letter_of
from ..communication import Names, kind_of_collective
from ..intervals import Intervals, as_intervals, difference, length_before, union
from ..phases import Phases
from ..trace import Trace
from .calls import CLOCK, calls_of_cpu, calls_of_gpu, queued_waits
from .dependencies import graph_of
from .replay import Change, Floats, Graph, Ints, Mask, previous_of, shorter
from .verdict import CAUSES, Verdict

COMPUTE, COMM, COPY = range(3)
_KINDS = {"compute": COMPUTE, "comm": COMM, "copy": COPY}
_CHUNKS = {"F": "F", "B": "B", "I": "B", "W": "B"}
MOST_EVENTS = 300_000
"""Causes are searched among this many events, the first ones."""

_LATENCY = 10.0  # at most so much of a launch's latency, beyond the call itself, is taken for unavoidable
_FULL_QUEUE = 900  # launches block when about 1,000 are queued
_BLOCKED = 100.0  # microseconds


class FoundCause(NamedTuple):
    """A cause, and the change that removes it. None: the gain cannot be predicted."""

    key: str
    """In CAUSES."""
    verdict: Verdict
    spans: Intervals
    """When it costs time."""
    change: Change | None


class Device:
    """In the graph of the device (dependencies.py), nodes are numbered: the ends of waits, the calls, the events."""

    def __init__(self, trace: Trace, names: Names):
        """trace: with the events of this device only."""
        every = sorted(trace.device_events, key=lambda event: (event.start, event.end))
        self.trace, self.phases, self.events = trace, Phases(trace, names), every[:MOST_EVENTS]
        self.is_cpu, self.origin = self.events[0].device == "cpu", self.events[0].start
        self.kind: Ints = np.array([_KINDS[names.kind_of(event)] for event in self.events], np.int64)
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
    def graph(self) -> Graph:
        return graph_of(self)

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

    @property
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
        full = np.isin(number, self.launch) & (queued >= _FULL_QUEUE) & (end - start > _BLOCKED)
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
        """The calls that waited for an event. In the graph, node i is the end of call `waiting_calls[i]`."""
        return np.flatnonzero(self.awaited >= 0)

    @property
    def call_nodes(self) -> Ints:
        """The node of each call."""
        return len(self.waiting_calls) + np.arange(len(self.calls))

    @property
    def first_event(self) -> int:
        """The node of the first event."""
        return len(self.waiting_calls) + len(self.calls)

    @property
    def event_nodes(self) -> Ints:
        """The node of each event."""
        return self.first_event + np.arange(len(self.events))

    @property
    def waited_us(self) -> Floats:
        """How long each transfer waited for other ranks, as far as known."""
        return self.duration - self.own_us

    @cached_property
    def is_comm(self) -> Mask:
        return self.kind == COMM

    @cached_property
    def is_point_to_point(self) -> Mask:
        """Sends and receives of a pipeline. The kernels' names do not say so."""
        kinds = [comm and kind_of_collective(e) for e, comm in zip(self.events, self.is_comm, strict=True)]
        return np.isin(kinds, ("send", "recv"))

    @cached_property
    def gaps(self) -> Intervals:
        """When nothing was computed or copied."""
        return self.outside(COMPUTE, COPY)

    @cached_property
    def idle(self) -> Intervals:
        """When nothing ran."""
        return self.outside(COMPUTE, COPY, COMM)

    @cached_property
    def waits(self) -> Intervals:
        """When a thread of a CPU waited for a transfer, or moved its data itself."""
        moved = self.is_comm & (self.is_point_to_point | (self.launch_end >= self.end) & (self.launch >= 0))
        calls = as_intervals((call.start, call.end) for call in self.calls if call.sync)
        return union(np.concatenate([calls, np.stack([self.start[moved], self.end[moved]], axis=1)]))

    def outside(self, *kinds: int) -> Intervals:
        """When no events of these kinds ran."""
        return difference(np.array([[0.0, self.window_us]]), self.spans(*kinds))

    def spans(self, *kinds: int) -> Intervals:
        chosen = np.isin(self.kind, kinds)
        return union(np.stack([self.start[chosen], self.end[chosen]], axis=1))

    def without_computation(self, start: Floats, end: Floats) -> Floats:
        """How much of each interval has no computation."""
        before = length_before(self.gaps)
        return before(np.maximum(start, end)) - before(start)

    def place(self, event: int) -> str:
        """The name of an event, as in the account: of the part of the program, the collective, or the kernel."""
        return self.phases.name_of(self.events[event])

    def launched_behind(self, event: int) -> str:
        """A sentence that names the last computation of another part of the program that was launched before a
        transfer; "" if unknown."""
        launch, own = self.launch, self.place(event)
        before = np.flatnonzero((launch < launch[event]) & (launch >= 0) & ~self.is_comm)
        places = map(self.place, before[np.argsort(-launch[before], kind="stable")].tolist())
        if (place := next((place for place in places if place != own), None)) is None:
            return ""
        return f" It was launched behind {place}: if it does not need that, launch it earlier."

    def longer(self, key: str, events: Ints, us: Floats, **facts: Any) -> list[FoundCause]:
        """The cause that makes `events` take so much longer, which is removed when they take less."""
        end, change = self.end[events], partial(shorter, nodes=self.event_nodes[events], us=us)
        return self.found(key, events, change, end - us, end, costs=us, **facts)

    def found(
        self, key: str, events: Sequence[int] | Ints, change: Change | None, start: Floats | None = None,
        end: Floats | None = None, *, costs: Floats | None = None, cost_us: float | None = None,
        places: Sequence[str] | None = None, **facts: Any,
    ) -> list[FoundCause]:  # fmt: skip
        """The cause of `events`, each of which lost the time from start to end. None if there are no events.

        key: in CAUSES. start, end: by default those of the events. costs: by default, what was not computed meanwhile;
        cost_us: by default, their sum. places: by default those of the events. facts: fields of the evidence.
        """
        if not len(events):
            return []
        start, end = self.start[events] if start is None else start, self.end[events] if end is None else end
        costs = self.without_computation(start, end) if costs is None else costs
        cost, worst = float(costs.sum()) if cost_us is None else cost_us, int(np.argmax(costs))
        places = places if places is not None else [self.place(int(event)) for event in events]
        row = CAUSES[key]
        known = {"count": len(events), "cost": cost, "most": costs[worst]}
        evidence = tuple(sentence.format(**known, **facts) for sentence in row.evidence)
        verdict = Verdict(
            key.partition("/")[0], row.title, evidence, row.remedy, most_costly(places, costs),
            float(start[worst]), float(end[worst]), cost,
        )  # fmt: skip
        return [FoundCause(key, verdict, union(np.stack([start, end], axis=1)), change)]


def most_costly(names: Sequence[str], costs: Iterable[float]) -> str:
    """The name with the largest sum of costs; "" if there is none."""
    sums: dict[str, float] = {}
    for name, cost in zip(names, costs, strict=True):
        sums[name] = sums.get(name, 0.0) + float(cost)
    return max(sums, key=lambda name: sums[name], default="")
