"""What all causes look at, and what they find."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..intervals import EMPTY, Intervals, difference, length_before, union
from .dependencies import Nodes, graph_of, latency_of, previous_on_stream, ready_times
from .replay import ASSUMED, DATA, Floats, Graph, Ints, Mask
from .verdict import CAUSES, Verdict
from .view import COMM, COMPUTE, COPY, View

Change = Callable[[Graph], Graph]
"""Returns the graph without a cause. It keeps the nodes, and the order of the waits."""


class Finding(NamedTuple):
    """A cause, and the change that removes it. None: the gain cannot be predicted."""

    verdict: Verdict
    spans: Intervals
    """When it costs time."""
    change: Change | None
    stays: Change | None = None
    """What the cause does to a graph without other causes. None: the recorded graph has all that it does."""


@dataclass(frozen=True)
class Case:
    """A device with its graph. Times are in microseconds from the start of its first event."""

    view: View
    graph: Graph
    nodes: Nodes
    comm_us: Floats | None = None
    """How long each event would take if all ranks joined at once, where several ranks are known."""

    @property
    def window_us(self) -> float:
        return self.view.window_us

    @cached_property
    def previous(self) -> Ints:
        """The event before each event on its stream, or -1."""
        return previous_on_stream(self.view)

    @cached_property
    def ready(self) -> Floats:
        """When each event was launched and its stream was free."""
        return ready_times(self.view)

    @cached_property
    def event_of(self) -> Ints:
        """The event of each node, or -1."""
        events = np.full(len(self.graph.start), -1, np.int64)
        events[self.nodes.event] = np.arange(len(self.view.events))
        return events

    @cached_property
    def latency(self) -> float:
        return latency_of(self.view)

    def inputs_ready(self, *kinds: int) -> Floats:
        """When the inputs of each event were ready, as far as they are known; 0 without any."""
        graph, waits = self.graph, self.graph.waits
        chosen, ends = np.isin(waits.kind, kinds), np.zeros(len(graph.start))
        np.maximum.at(ends, waits.target[chosen], (graph.start + graph.duration)[waits.source[chosen]])
        return ends[self.nodes.event]

    @cached_property
    def could_start(self) -> Floats:
        """When each event was launched and its inputs were ready, whatever else its stream had to do."""
        calls = np.array([call.start for call in self.view.calls] or [0.0])
        launched = np.where(self.view.launch >= 0, calls[self.view.launch] + self.latency, self.view.start)
        return np.maximum(self.inputs_ready(DATA, ASSUMED), launched)

    @cached_property
    def own_us(self) -> Floats:
        """How long each event takes without waits for other ranks, as far as known."""
        duration = self.view.duration
        return (
            duration if self.comm_us is None else np.where(self.is_comm, np.minimum(duration, self.comm_us), duration)
        )

    @cached_property
    def is_comm(self) -> Mask:
        return self.view.kind == COMM

    @cached_property
    def computing(self) -> Intervals:
        """When kernels or copies ran."""
        return self.spans((COMPUTE, COPY))

    @cached_property
    def transferring(self) -> Intervals:
        return self.spans((COMM,))

    @cached_property
    def gaps(self) -> Intervals:
        """When nothing was computed or copied."""
        whole = np.array([[0.0, self.window_us]]) if self.window_us else EMPTY
        return difference(whole, self.computing)

    def spans(self, kinds: Iterable[int]) -> Intervals:
        chosen = np.isin(self.view.kind, [*kinds])
        return union(np.stack([self.view.start[chosen], self.view.end[chosen]], axis=1))

    def without_computation(self, start: Floats, end: Floats) -> Floats:
        """How much of each interval has no computation."""
        before = length_before(self.gaps)
        return before(np.maximum(start, end)) - before(start)

    @cached_property
    def idle(self) -> Intervals:
        """When nothing ran."""
        return difference(self.gaps, self.transferring)

    def place(self, event: int) -> str:
        """The annotation of an event's launch; otherwise its collective or its own name."""
        view = self.view
        if view.labels[event]:
            return view.labels[event]
        collective = view.events[event].collective
        if collective is not None:
            group = collective.description or collective.group
            return f"{collective.name} in {group}" if group else collective.name
        return view.events[event].name

    def launched_behind(self, event: int) -> str:
        """A sentence that names the last computation that was launched before a transfer; "" if unknown."""
        view = self.view
        before = np.flatnonzero((view.launch < view.launch[event]) & (view.launch >= 0) & ~self.is_comm)
        if not len(before):
            return ""
        place = self.place(int(before[np.argmax(view.launch[before])]))
        return f" It was launched behind {place}: if it does not need that, launch it earlier."

    def finding(
        self, key: str, events: Sequence[int] | Ints, start: Floats, end: Floats, evidence: Sequence[str],
        change: Change | None, *, costs: Floats | None = None, cost_us: float | None = None,
        places: Sequence[str] | None = None, stays: Change | None = None,
    ) -> Finding:  # fmt: skip
        """A finding about `events`, each of which lost the time from start to end.

        key: in CAUSES. costs: by default, what was not computed meanwhile. places: by default those of the events.
        """
        costs = self.without_computation(start, end) if costs is None else costs
        worst = int(np.argmax(costs))
        places = places if places is not None else [self.place(int(event)) for event in events]
        title, remedy = CAUSES[key]
        verdict = Verdict(
            key.partition("/")[0], title, tuple(evidence), remedy, most_costly(places, costs),
            float(start[worst]), float(end[worst]), float(costs.sum()) if cost_us is None else cost_us,
        )  # fmt: skip
        return Finding(verdict, union(np.stack([start, end], axis=1)), change, stays)


def case_of(view: View) -> Case:
    return Case(view, *graph_of(view))


def without_waits(unwanted: Mask) -> Change:
    """Drop waits, a mask over those of the recorded graph."""

    def change(graph: Graph) -> Graph:
        lag = graph.waits.lag.copy()
        lag[: len(unwanted)][unwanted] = -np.inf
        return replace(graph, waits=graph.waits._replace(lag=lag))

    return change


def shorter(nodes: Ints, us: Floats) -> Change:
    """Shorten nodes by these times."""

    def change(graph: Graph) -> Graph:
        duration = graph.duration.copy()
        duration[nodes] = np.maximum(duration[nodes] - us, 0.0)
        return replace(graph, duration=duration)

    return change


def most_costly(names: Sequence[str], costs: Iterable[float]) -> str:
    """The name with the largest sum of costs; "" if there is none."""
    sums: dict[str, float] = {}
    for name, cost in zip(names, costs, strict=True):
        sums[name] = sums.get(name, 0.0) + float(cost)
    return max(sums, key=lambda name: sums[name], default="")
