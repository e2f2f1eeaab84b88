"""A device with its graph, on which all causes are searched, and what is found."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..communication import kind_of_collective
from ..intervals import EMPTY, Intervals, as_intervals, difference, length_before, union
from .replay import Change, Floats, Graph, Ints, Mask
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


@dataclass(frozen=True)
class Device:
    """A device with its graph. Times are in microseconds from the start of its first event."""

    view: View
    graph: Graph
    comm_us: Floats | None = None
    """How long each event would take if all ranks joined at once, where several ranks are known."""

    @property
    def window_us(self) -> float:
        return self.view.window_us

    @cached_property
    def own_us(self) -> Floats:
        """How long each event takes without waits for other ranks, as far as known."""
        most = np.inf if self.comm_us is None else np.where(self.is_comm, self.comm_us, np.inf)
        return np.minimum(self.view.duration, most)

    @property
    def waited_us(self) -> Floats:
        """How long each transfer waited for other ranks, as far as known."""
        return self.view.duration - self.own_us

    @cached_property
    def is_comm(self) -> Mask:
        return self.view.kind == COMM

    @cached_property
    def is_point_to_point(self) -> Mask:
        """Sends and receives of a pipeline. The kernels' names do not say so."""
        kinds = [comm and kind_of_collective(e) for e, comm in zip(self.view.events, self.is_comm, strict=True)]
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
        view = self.view
        moved = self.is_comm & (self.is_point_to_point | (view.launch_end >= view.end) & (view.launch >= 0))
        calls = as_intervals((call.start, call.end) for call in view.calls if call.sync)
        return union(np.concatenate([calls, np.stack([view.start[moved], view.end[moved]], axis=1)]))

    def outside(self, *kinds: int) -> Intervals:
        """When no events of these kinds ran."""
        whole = np.array([[0.0, self.window_us]]) if self.window_us else EMPTY
        return difference(whole, self.spans(*kinds))

    def spans(self, *kinds: int) -> Intervals:
        chosen = np.isin(self.view.kind, kinds)
        return union(np.stack([self.view.start[chosen], self.view.end[chosen]], axis=1))

    def without_computation(self, start: Floats, end: Floats) -> Floats:
        """How much of each interval has no computation."""
        before = length_before(self.gaps)
        return before(np.maximum(start, end)) - before(start)

    def place(self, event: int) -> str:
        """The annotation of an event's launch; otherwise its collective or its own name."""
        view = self.view
        collective = view.events[event].collective
        if view.labels[event] or collective is None:
            return view.labels[event] or view.events[event].name
        group = collective.description or collective.group
        return f"{collective.name} in {group}" if group else collective.name

    def launched_behind(self, event: int) -> str:
        """A sentence that names the last computation of another part of the program that was launched before a
        transfer; "" if unknown."""
        launch, own = self.view.launch, self.place(event)
        before = np.flatnonzero((launch < launch[event]) & (launch >= 0) & ~self.is_comm)
        places = map(self.place, before[np.argsort(-launch[before], kind="stable")].tolist())
        if (place := next((place for place in places if place != own), None)) is None:
            return ""
        return f" It was launched behind {place}: if it does not need that, launch it earlier."

    def found(
        self, key: str, events: Sequence[int] | Ints, start: Floats, end: Floats, change: Change | None, *,
        costs: Floats | None = None, cost_us: float | None = None, places: Sequence[str] | None = None,
        **facts: object,
    ) -> list[FoundCause]:  # fmt: skip
        """The cause of `events`, each of which lost the time from start to end. None if there are no events.

        key: in CAUSES. costs: by default, what was not computed meanwhile; cost_us: by default, their sum.
        places: by default those of the events. facts: fields of the evidence.
        """
        if not len(events):
            return []
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
