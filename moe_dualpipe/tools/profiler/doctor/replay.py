"""Replay a recorded graph of dependencies, as recorded or after a change.

A node is a call of the host, the end of a wait, a kernel, a copy or a transfer. It starts when all that it depends on
has happened, plus its own delay. The delay is what nothing recorded explains, and every replay keeps it. So a replay
without a change gives the recorded times exactly, and a shorter node never makes another one later. A gain is the
difference between two replayed windows, not a sum of waits: when one wait goes, another often takes its place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

BEFORE, LAUNCH, DATA, ORDER, SYNC, ASSUMED = range(6)
"""Kinds of edges. A node follows
BEFORE: the previous node of its stream or thread. LAUNCH: the start of the call that launches it.
DATA: its input, on another stream. ASSUMED: an input that was ready in time.
ORDER: work that it does not need; it started when this work ended.
SYNC: the work that a call of the host waits for."""


class Edges(NamedTuple):
    """Dependencies: node `target` starts at least `lag` after the moment `source`. A lag of -inf is no dependency.

    The moment 2n is the start of node n, and 2n + 1 its end.
    """

    source: Ints
    target: Ints
    lag: Floats
    kind: Ints

    @property
    def source_node(self) -> Ints:
        return self.source // 2

    def keep(self, kept: Mask | Ints) -> "Edges":
        """Those that a mask or numbers choose."""
        return Edges(self.source[kept], self.target[kept], self.lag[kept], self.kind[kept])


def ends(nodes: Ints) -> Ints:
    """The moments at which nodes end."""
    return 2 * nodes + 1


def edges(source: Ints, target: Ints, lag: Floats | float, kind: Ints | int) -> Edges:
    """Edges with one lag or kind for all, or one each."""
    return Edges(source, target, np.broadcast_to(lag, source.shape), np.broadcast_to(kind, source.shape))


def merged(parts: Sequence[Edges]) -> Edges:
    return Edges(*(np.concatenate(column) for column in zip(*parts, strict=True)))


class NodeTimes(NamedTuple):
    """The start and the end of each node."""

    start: Floats
    end: Floats
    is_device: Mask

    @property
    def window_us(self) -> float:
        """From the first start to the last end on the device."""
        return float(self.end[self.is_device].max() - self.start[self.is_device].min())


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes with their dependencies. Times in microseconds."""

    is_device: Mask
    start: Floats
    """As recorded."""
    duration: Floats
    edges: Edges
    """Of n nodes, edge i is BEFORE to node i, and edge n + i is LAUNCH to node i."""
    delay: Floats
    """From the last dependency to the start; for nodes without any, the recorded start."""

    @property
    def recorded(self) -> NodeTimes:
        return NodeTimes(self.start, self.start + self.duration, self.is_device)


Change = Callable[[Graph], Graph]
"""Returns the graph without a cause. It keeps the nodes, and the order of the edges; it may add further ones."""


def graph_of_nodes(
    is_device: Mask, start: Floats, duration: Floats, before: Ints, before_lag: Floats, launch: Ints,
    launch_lag: Floats | float, others: Edges,
) -> Graph:  # fmt: skip
    """The graph, with the delays that make its replay equal to the recording.

    before, launch: a node for each node, or -1. Dependencies on nodes that started later are dropped. A lag that is
    longer than recorded, because clocks are coarse, is cut.
    """
    nodes = np.arange(len(start))
    chain = [edges(ends(before), nodes, before_lag, BEFORE), edges(2 * launch, nodes, launch_lag, LAUNCH)]
    place = _places(start, is_device)
    found = merged([*chain, others.keep(place[others.source_node] < place[others.target])])
    known = (found.source >= 0) & (place[found.source_node] < place[found.target])
    source = np.where(known, found.source, 0)
    times = np.stack([start, start + duration], axis=1).ravel()
    lag = np.where(known, np.minimum(found.lag, start[found.target] - times[source]), -np.inf)
    ready = np.full(len(start), -np.inf)
    np.maximum.at(ready, found.target, times[source] + lag)
    delay = np.where(np.isinf(ready), start, start - ready)
    return Graph(is_device, start, duration, found._replace(source=source, lag=lag), delay)


def previous_of(group: Ints) -> Ints:
    """For each element, the previous one of the same group; -1 for the first."""
    order = np.argsort(group, kind="stable")
    previous = np.full(len(order), -1, np.int64)
    same = group[order[1:]] == group[order[:-1]]
    previous[order[1:][same]] = order[:-1][same]
    return previous


def _places(start: Floats, is_device: Mask) -> Ints:
    """The place of each node in the order of the starts; at the same time, the host's first, and by their numbers."""
    return np.argsort(np.lexsort((is_device, start)))


def order_of(graph: Graph) -> list[int]:
    """Return an order in which each node comes after all that it depends on: that of the recording if possible.

    Raises CycleError if nodes wait for each other.
    """
    order = np.lexsort((graph.is_device, graph.start)).tolist()
    used = graph.edges.keep(graph.edges.lag > -np.inf)
    place = _places(graph.start, graph.is_device)
    if (place[used.source_node] < place[used.target]).all():
        return order
    sorter = TopologicalSorter(dict.fromkeys(order, ()))
    for one, other in zip(used.source_node.tolist(), used.target.tolist(), strict=True):
        sorter.add(other, one)
    return [*sorter.static_order()]


def replay(graph: Graph) -> NodeTimes:
    """Return the times of all nodes.

    Raises CycleError if nodes wait for each other.
    """
    used = graph.edges.keep(graph.edges.lag > -np.inf)
    used = used.keep(np.argsort(used.target, kind="stable"))
    first = np.searchsorted(used.target, np.arange(len(graph.start) + 1)).tolist()
    sources, lags = used.source.tolist(), used.lag.tolist()
    duration, delay = graph.duration.tolist(), graph.delay.tolist()
    times = [0.0] * (2 * len(delay))
    for node in order_of(graph):
        ready = [times[sources[at]] + lags[at] for at in range(first[node], first[node + 1])]
        start = max(ready, default=0.0) + delay[node]
        times[2 * node] = start
        times[2 * node + 1] = start + duration[node]
    return NodeTimes(np.array(times[::2]), np.array(times[1::2]), graph.is_device)


def without(graph: Graph, rows: Ints) -> Graph:
    """Drop edges."""
    lag = graph.edges.lag.copy()
    lag[rows] = -np.inf
    return replace(graph, edges=graph.edges._replace(lag=lag))


def shorter(graph: Graph, nodes: Ints, us: Floats) -> Graph:
    """Shorten nodes by these times."""
    duration = graph.duration.copy()
    duration[nodes] = np.maximum(duration[nodes] - us, 0.0)
    return replace(graph, duration=duration)
