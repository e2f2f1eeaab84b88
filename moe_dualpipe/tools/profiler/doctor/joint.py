"""One graph of several ranks that wait for each other in collectives.

A collective ends on all ranks at the same time, so its event is shortest on the rank that joined last. This is its
duration without waits; no common clock is needed.

A rank that gets faster waits longer in its next collective if another rank stays slow. In the graph of one rank, a
collective takes as long as recorded, waits included. In the graph of all ranks, it has three parts:

    join   this rank has joined; one node for each rank
    hub    all ranks have joined; one node for all ranks
    move   the time that the collective takes from then on; one node for each rank

    rank 0   join --.         .--> move --> what follows on rank 0
                     >--> hub
    rank 1   join --'         '--> move --> what follows on rank 1

"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..ranks import Meeting
from .device import Device
from .replay import DATA, Edges, Floats, Graph, Ints, NodeTimes, edges, ends, merged, replay


class SharedCollectives(NamedTuple):
    """The collectives that several ranks have in common: a row for each collective and rank."""

    rank: Ints
    """Position of the rank."""
    event: Ints
    """Number of its event, where the events of all ranks are numbered one after another."""
    collective: Ints
    """Number of the collective."""
    duration: Floats

    @property
    def own_us(self) -> Floats:
        """The duration of the collective from the moment when all ranks have joined."""
        return self.over_ranks(np.minimum, self.duration)

    def over_ranks(self, combine: np.ufunc, values: np.ndarray) -> np.ndarray:
        """Combine the values of all ranks. Returns the result of a collective in each of its rows."""
        found = np.empty(self.collective.max(initial=-1) + 1, values.dtype)
        found[self.collective] = values
        combine.at(found, self.collective, values)
        return found[self.collective]

    def largest(self, values: Sequence[Floats]) -> list[Floats]:
        """Replace the values of each collective by the largest one of any rank. values: of the events of each rank."""
        every = np.concatenate(values)
        every[self.event] = self.over_ranks(np.maximum, every[self.event])
        return np.split(every, np.cumsum([len(own) for own in values])[:-1])


def shared_collectives(devices: Sequence[Device], meetings: Sequence[Meeting]) -> SharedCollectives:
    """The collectives whose events are all on `devices`. Sends and receives are left out: they have other causes."""
    first = np.cumsum([0, *(len(device.events) for device in devices)])
    places = {
        id(device.events[event]): (rank, int(first[rank]) + event)
        for rank, device in enumerate(devices)
        for event in np.flatnonzero(device.is_comm & ~device.is_point_to_point).tolist()
    }
    rows = [
        (*places[id(event)], number)
        for number, meeting in enumerate(meetings)
        for event in meeting.events if all(id(other) in places for other in meeting.events)
    ]  # fmt: skip
    rank, event, collective = np.array(rows, np.int64).reshape(-1, 3).T
    durations = np.concatenate([np.empty(0), *(device.duration for device in devices)])
    return SharedCollectives(rank, event, np.unique(collective, return_inverse=True)[1], durations[event])


def join(devices: Sequence[Device], shared: SharedCollectives) -> None:
    """Tell each device that has shared collectives how long its transfers take without waits, and who joined last."""
    own_us = shared.own_us
    times = np.concatenate([np.empty(0), *(device.duration for device in devices)])
    last, waited = np.full(len(times), -1, np.int64), np.zeros(len(times))
    times[shared.event] = own_us
    joined_last = np.where(shared.duration == own_us, shared.rank, len(devices))
    last[shared.event] = shared.over_ranks(np.minimum, joined_last)
    waited[shared.event] = shared.over_ranks(np.maximum, shared.duration) - own_us
    bounds = np.cumsum([len(device.events) for device in devices])[:-1]
    for device, *own in zip(devices, *(np.split(every, bounds) for every in (times, last, waited)), strict=True):
        device.own_us, device.last, device.longest_wait_us = own


class JointGraph:
    """Nodes are numbered: first those of rank 0, of rank 1 and so on, then the hubs, then the moves.

    Raises CycleError if the waits of the ranks for each other form a cycle.
    """

    def __init__(self, devices: Sequence[Device], shared: SharedCollectives, shifts: Sequence[float]):
        """shifts: what to add to the times of each rank for a common clock (../ranks.py)."""
        self.recorded, self.shifts = [device.graph for device in devices], shifts
        self.first = np.cumsum([0, *(len(graph.start) for graph in self.recorded)])
        start = np.concatenate([graph.start + shift for graph, shift in zip(self.recorded, shifts, strict=True)])
        nodes = [first + device.event_nodes for first, device in zip(self.first[:-1], devices, strict=True)]
        self.joins, self.own_us = np.concatenate(nodes)[shared.event], shared.own_us
        hub_start = shared.over_ranks(np.maximum, start[self.joins])
        # the lag from hub to move is not 0 if clocks or recorded ends differ a little
        self.lag = start[self.joins] + shared.duration - self.own_us - hub_start
        hubs = np.empty(shared.collective.max() + 1)
        hubs[shared.collective] = hub_start
        self.start = np.concatenate([start, hubs, hub_start + np.maximum(self.lag, 0.0)])
        self.hub_of = len(start) + shared.collective
        self.moves = len(start) + len(hubs) + np.arange(len(self.joins))
        self.replay(self.recorded)

    def replay(self, graphs: Sequence[Graph]) -> list[NodeTimes]:
        """Return the times of each rank's nodes. graphs: the changed graphs of the ranks.

        Raises CycleError if the dependencies form a cycle.
        """
        more = np.zeros(len(self.start) - self.first[-1])
        duration = np.concatenate([*(graph.duration for graph in graphs), more])
        recorded = np.concatenate([graph.duration for graph in self.recorded])
        duration[self.moves] = np.maximum(self.own_us + duration[self.joins] - recorded[self.joins], 0.0)
        delay = [_delay(graph, shift) for graph, shift in zip(graphs, self.shifts, strict=True)]
        is_device = np.concatenate([*(graph.is_device for graph in graphs), more > 0])
        times = replay(Graph(is_device, self.start, duration, self._edges(graphs), np.concatenate([*delay, more])))
        times.end[self.joins] = times.end[self.moves]
        bounds = zip(graphs, self.first[:-1], self.first[1:], strict=True)
        return [NodeTimes(times.start[a:b], times.end[a:b], graph.is_device) for graph, a, b in bounds]

    def _edges(self, graphs: Sequence[Graph]) -> Edges:
        """The edges of all ranks. Those from the end of a collective start at its move instead."""
        moment = np.arange(2 * len(self.start))
        moment[ends(self.joins)] = ends(self.moves)
        parts = [
            graph.edges._replace(source=moment[graph.edges.source + 2 * first], target=graph.edges.target + first)
            for graph, first in zip(graphs, self.first[:-1], strict=True)
        ]
        joined = edges(2 * self.joins, self.hub_of, 0.0, DATA)
        return merged([*parts, joined, edges(2 * self.hub_of, self.moves, self.lag, DATA)])


def _delay(graph: Graph, shift: float) -> Floats:
    """The delays of the nodes on another clock: a node that depends on nothing starts later by `shift`."""
    first = np.ones(len(graph.start), bool)
    first[graph.edges.target[graph.edges.lag > -np.inf]] = False
    return graph.delay + shift * first
