"""A device with its graph, on which all causes are searched, and what is found."""

from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from ..communication import kind_of_collective
from ..intervals import Intervals, as_intervals, difference, length_before, union
from .dependencies import graph_of
from .replay import SYNC, Change, Floats, Graph, Ints, Mask, shorter
from .verdict import CAUSES, Verdict
from .view import COMM, COMPUTE, COPY, View


class FoundCause(NamedTuple):
    """A cause, and the change that removes it. None: the gain cannot be predicted."""

    key: str
    """In CAUSES."""
    verdict: Verdict
    spans: Intervals
    """When it costs time."""
    change: Change | None


class Device(View):
    @cached_property
    def graph(self) -> Graph:
        return graph_of(self)

    @cached_property
    def syncs(self) -> tuple[Ints, Ints]:
        """The edges of the graph to the ends of waits, and the calls that wait."""
        rows = np.flatnonzero(self.graph.edges.kind == SYNC)
        return rows, self.waiting_calls[self.graph.edges.target[rows] - len(self.events)]

    @property
    def waited_us(self) -> Floats:
        """How long each transfer waited for other ranks, as far as known."""
        return self.duration - self.own_us

    @cached_property
    def is_point_to_point(self) -> Mask:
        """Sends and receives of a pipeline. The kernels' names do not say so."""
        kinds = [comm and kind_of_collective(e) for e, comm in zip(self.events, self.is_comm, strict=True)]
        return np.isin(kinds, ("send", "recv"))

    @cached_property
    def computing(self) -> Ints:
        """The events that compute, in order."""
        return np.flatnonzero(self.kind == COMPUTE)

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
        return self.events[event].place

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
        end, change = self.end[events], partial(shorter, nodes=events, us=us)
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
