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

import numpy as np

from ..ranks import Meeting
from .device import Device
from .replay import DATA, Edges, Floats, Graph, Ints, NodeTimes, edges, ends, merged, replay


def shared_collectives(devices: Sequence[Device], meetings: Sequence[Meeting]) -> Ints:
    """The numbers of the events of each collective whose events are all on `devices`, -1 for ranks without one.

    Sends and receives are left out: they have other causes.
    """
    places = [
        {id(device.events[i]): i for i in np.flatnonzero(device.is_comm & ~device.is_point_to_point).tolist()}
        for device in devices
    ]
    event_CR = np.full((len(meetings), len(devices)), -1)
    for row, meeting in zip(event_CR, meetings, strict=True):
        found = [places[rank].get(id(event)) for rank, event in zip(meeting.members, meeting.events, strict=True)]
        if None not in found:
            row[[*meeting.members]] = found
    return event_CR[(event_CR >= 0).any(axis=1)]


def gathered(event_CR: Ints, values: Sequence[Floats], absent: float) -> Floats:
    """The values of the events, shape [C, R]. values: of each rank, those of its events first."""
    columns = zip(values, event_CR.T, strict=True)
    return np.stack([np.append(own, absent)[events] for own, events in columns], axis=1)


def scattered(event_CR: Ints, value_C: np.ndarray, values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The values of the events of each rank, with those of collectives replaced. value_C: the same on all ranks."""
    found = [np.append(own, own[:1]) for own in values]
    for own, events in zip(found, event_CR.T, strict=True):
        own[events] = value_C
    return [own[:-1] for own in found]


def join(devices: Sequence[Device], event_CR: Ints) -> None:
    """Tell each device that has shared collectives how long its transfers take without waits, and who joined last."""
    durations = [device.duration for device in devices]
    duration_CR = gathered(event_CR, durations, np.inf)
    own_C, longest_C = duration_CR.min(axis=1), gathered(event_CR, durations, -np.inf).max(axis=1)
    of_ranks = (
        scattered(event_CR, own_C, durations),
        scattered(event_CR, duration_CR.argmin(axis=1), [device.last for device in devices]),
        scattered(event_CR, longest_C - own_C, [device.longest_wait_us for device in devices]),
    )
    for device, *own in zip(devices, *of_ranks, strict=True):
        device.own_us, device.last, device.longest_wait_us = own


class JointGraph:
    """Nodes are numbered: first those of rank 0, of rank 1 and so on, then the hubs, then the moves.

    Raises CycleError if the waits of the ranks for each other form a cycle.
    """

    def __init__(self, devices: Sequence[Device], event_CR: Ints, shifts: Sequence[float]):
        """event_CR: the shared collectives. Without any, each rank is alone.

        shifts: what to add to the times of each rank for a common clock (../ranks.py).
        """
        self.recorded, self.event_CR, self.shifts = [device.graph for device in devices], event_CR, shifts
        self.first = np.cumsum([0, *(len(graph.start) for graph in self.recorded)])
        starts = [graph.start + shift for graph, shift in zip(self.recorded, shifts, strict=True)]
        start, durations = np.concatenate(starts), [graph.duration for graph in self.recorded]
        collective, rank = np.nonzero(event_CR >= 0)
        self.joins = self.first[rank] + event_CR[collective, rank]
        self.own_us = gathered(event_CR, durations, np.inf).min(axis=1)[collective]
        hubs = gathered(event_CR, starts, -np.inf).max(axis=1)
        # the lag from hub to move is not 0 if clocks or recorded ends differ a little
        self.lag = start[self.joins] + np.concatenate(durations)[self.joins] - self.own_us - hubs[collective]
        self.start = np.concatenate([start, hubs, hubs[collective] + np.maximum(self.lag, 0.0)])
        self.hub_of = len(start) + collective
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
        is_device = np.concatenate([*(graph.is_device for graph in graphs), more == 0])
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
