"""One graph of several ranks that wait for each other in collectives.

The events of one collective on several ranks are a meeting (../matching.py). A collective ends on all ranks at the same
time, so its event is shortest on the rank that joined last: this is what it takes without waits, and needs no common
clock.

A rank that gets faster waits longer in its next collective if another rank stays slow. In the graph of one rank, a
collective takes as long as recorded, waits included. In the graph of all ranks, it has three parts:

    join   this rank has joined; one node for each rank
    hub    all ranks have joined; one node for all ranks
    move   the time that the collective takes from then on; one node for each rank

    rank 0   join --.         .--> move --> what follows on rank 0
                     >--> hub
    rank 1   join --'         '--> move --> what follows on rank 1

"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..ranks import Meeting
from .case import Case
from .causes.exposed import is_point_to_point
from .replay import DATA, Edges, Floats, Graph, Ints, Mask, Times, edges, ends, merged, replay


class Met(NamedTuple):
    """The n collectives that the same M ranks have in common, in order."""

    ranks_M: Ints
    """Positions of the ranks."""
    events_Mn: Ints
    durations_Mn: Floats

    @property
    def own_us(self) -> Floats:
        """What each collective takes once all ranks have joined. Shape [n]."""
        return self.durations_Mn.min(axis=0)

    def members(self) -> Iterator[tuple[int, Ints]]:
        """Each rank with its events."""
        return zip(self.ranks_M.tolist(), self.events_Mn, strict=True)


def meetings_of(cases: Sequence[Case], meetings: Sequence[Meeting]) -> list[Met]:
    """The collectives whose events are all in `cases`. Sends and receives are left out: they have other causes."""
    places = {
        id(case.view.events[event]): (rank, event)
        for rank, case in enumerate(cases)
        for event in np.flatnonzero(case.is_comm).tolist()
        if not is_point_to_point(case, event)
    }
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = defaultdict(list)
    for meeting in meetings:
        members = [places[id(event)] for event in meeting.events if id(event) in places]
        if len(members) == len(meeting.events):
            ranks, events = zip(*members, strict=True)
            groups[ranks].append(events)
    found = []
    for ranks, events_nM in groups.items():
        events_Mn = np.array(events_nM, np.int64).T
        durations = [cases[rank].view.duration[events] for rank, events in zip(ranks, events_Mn, strict=True)]
        found.append(Met(np.array(ranks, np.int64), events_Mn, np.array(durations)))
    return found


def largest(values: Sequence[Floats], meetings: Sequence[Met]) -> list[Floats]:
    """For each collective, the largest value on any of its ranks. values: of the events of each rank."""
    found = [own.copy() for own in values]
    for met in meetings:
        most = np.max([values[rank][events] for rank, events in met.members()], axis=0)
        for rank, events in met.members():
            found[rank][events] = most
    return found


class Joined(NamedTuple):
    """Who joined each event of a case last: the number of that case, or -1; and the longest wait for it."""

    last: Ints
    waited_us: Floats


def join(cases: Sequence[Case], meetings: Sequence[Met]) -> Iterator[tuple[Case, Joined | None]]:
    """Yield each case with the durations of its transfers without waits, and who joined last.

    For a case without meetings, both are unknown (None).
    """
    for number, case in enumerate(cases):
        own = [(met, events) for met in meetings for rank, events in met.members() if rank == number]
        joined = Joined(np.full(len(case.view.events), -1, np.int64), np.zeros(len(case.view.events)))
        times = case.view.duration.copy()
        for met, events in own:
            times[events] = met.own_us
            joined.last[events] = met.ranks_M[met.durations_Mn.argmin(axis=0)]
            joined.waited_us[events] = met.durations_Mn.max(axis=0) - met.own_us
        yield (replace(case, comm_us=times), joined) if own else (case, None)


class JointGraph:
    """Nodes are numbered: first those of rank 0, of rank 1 and so on, then the hubs, then the moves.

    Raises CycleError if the waits of the ranks for each other form a cycle.
    """

    def __init__(self, cases: Sequence[Case], meetings: Sequence[Met], shifts: Sequence[float]):
        """shifts: what to add to the times of each rank for a common clock (../ranks.py)."""
        self.recorded, self.shifts = [case.graph for case in cases], shifts
        self.first = np.cumsum([0, *(len(graph.start) for graph in self.recorded)])
        shifted = [graph.start + shift for graph, shift in zip(self.recorded, shifts, strict=True)]
        parts, hubs = [], int(self.first[-1])
        for met in meetings:
            joins_Mn = np.array([self.first[r] + cases[r].nodes.event[events] for r, events in met.members()])
            starts_Mn = np.concatenate(shifted)[joins_Mn]
            lag_Mn = starts_Mn + met.durations_Mn - met.own_us - starts_Mn.max(axis=0)
            hubs_Mn, own_Mn = (
                np.broadcast_to(row, joins_Mn.shape) for row in (hubs + np.arange(len(met.own_us)), met.own_us)
            )
            parts.append((joins_Mn.ravel(), hubs_Mn.ravel(), starts_Mn.ravel(), own_Mn.ravel(), lag_Mn.ravel()))
            hubs += len(met.own_us)
        self.joins, self.hub_of, starts, self.own_us, self.lag = (
            np.concatenate(column) for column in zip(*parts, strict=True)
        )
        # the lag from hub to move is not 0 if clocks or recorded ends differ a little
        hub_starts = np.full(hubs - self.first[-1], -np.inf)
        np.maximum.at(hub_starts, self.hub_of - self.first[-1], starts)
        moves = hub_starts[self.hub_of - self.first[-1]] + np.maximum(self.lag, 0.0)
        self.start = np.concatenate([*shifted, hub_starts, moves])
        self.moves = hubs + np.arange(len(self.joins))
        self.replay(self.recorded)

    def replay(self, graphs: Sequence[Graph]) -> list[Times]:
        """Return the times of each rank's nodes. graphs: the changed graphs of the ranks.

        Raises CycleError if the dependencies form a cycle.
        """
        more = np.zeros(len(self.start) - self.first[-1])
        duration = np.concatenate([*(graph.duration for graph in graphs), more])
        recorded = np.concatenate([graph.duration for graph in self.recorded])
        duration[self.moves] = np.maximum(self.own_us + duration[self.joins] - recorded[self.joins], 0.0)
        delay = [graph.delay + shift * ~_has_input(graph) for graph, shift in zip(graphs, self.shifts, strict=True)]
        is_device = np.concatenate([*(graph.is_device for graph in graphs), more > 0])
        times = replay(Graph(is_device, self.start, duration, self._edges(graphs), np.concatenate([*delay, more])))
        times.end[self.joins] = times.end[self.moves]
        bounds = zip(graphs, self.first[:-1], self.first[1:], strict=True)
        return [Times(times.start[a:b], times.end[a:b], graph.is_device) for graph, a, b in bounds]

    def _edges(self, graphs: Sequence[Graph]) -> Edges:
        """What follows a collective follows its move."""
        moment = np.arange(2 * len(self.start))
        moment[ends(self.joins)] = ends(self.moves)
        parts = [
            graph.edges._replace(source=moment[graph.edges.source + 2 * first], target=graph.edges.target + first)
            for graph, first in zip(graphs, self.first[:-1], strict=True)
        ]
        joined = edges(2 * self.joins, self.hub_of, 0.0, DATA)
        return merged([*parts, joined, edges(2 * self.hub_of, self.moves, self.lag, DATA)])


def _has_input(graph: Graph) -> Mask:
    found = np.zeros(len(graph.start), bool)
    found[graph.edges.target[graph.edges.lag > -np.inf]] = True
    return found
