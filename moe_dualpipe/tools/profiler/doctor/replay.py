"""Replay a recorded graph of dependencies, as recorded or after a change.

A node is a call of the host, a kernel, a copy or a transfer. It starts when all that it depends on has happened, plus
its own delay, which nothing recorded explains and which every replay keeps. So a replay without a change gives back the
recorded times exactly, and a shorter node never makes another one later. A gain is the difference of two replayed
windows, not a sum of waits: when one wait goes, another often takes its place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

BEFORE, LAUNCH, DATA, ORDER, SYNC, ASSUMED = range(6)
"""Kinds of edges: the node before in a stream or thread; the call that launches; a transfer or another stream has the
input; a start that fits the end of unrelated work; a call of the host waits for the device; an input that was there in
time."""


class Edges(NamedTuple):
    """Dependencies: node `target` starts at least `lag` after the moment `source`, if lag is not -inf.

    The moment 2n is the start of node n, and 2n + 1 its end.
    """

    source: Ints
    target: Ints
    lag: Floats
    kind: Ints

    @property
    def source_node(self) -> Ints:
        return self.source // 2

    def keep(self, kept: Mask) -> "Edges":
        return Edges(self.source[kept], self.target[kept], self.lag[kept], self.kind[kept])


def ends(nodes: Ints) -> Ints:
    """The moments at which nodes end."""
    return 2 * nodes + 1


def edges(source: Ints, target: Ints, lag: Floats | float, kind: Ints | int) -> Edges:
    """Edges with one lag or kind for all, or one each."""
    return Edges(source, target, np.broadcast_to(lag, source.shape), np.broadcast_to(kind, source.shape))


def merged(parts: Sequence[Edges]) -> Edges:
    return Edges(*(np.concatenate(column) for column in zip(*parts, strict=True)))


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in the order of their recorded starts. Times in microseconds."""

    is_device: Mask
    start: Floats
    """As recorded."""
    duration: Floats
    edges: Edges
    """Of n nodes, edge i is BEFORE to node i, and edge n + i is LAUNCH to node i."""
    delay: Floats
    """From the last dependency to the start; for nodes without any, the recorded start."""

    @property
    def recorded(self) -> "Times":
        return Times(self.start, self.start + self.duration, self.is_device)


Change = Callable[[Graph], Graph]
"""Returns the graph without a cause. It keeps the nodes, and the order of the edges; it may add further ones."""


class Times(NamedTuple):
    """The start and the end of each node."""

    start: Floats
    end: Floats
    is_device: Mask

    @property
    def window_us(self) -> float:
        """From the first start to the last end on the device."""
        if not self.is_device.any():
            return 0.0
        return float(self.end[self.is_device].max() - self.start[self.is_device].min())


def graph_of_nodes(
    is_device: Mask, start: Floats, duration: Floats, before: Ints, before_lag: Floats, launch: Ints,
    launch_lag: Floats | float, others: Edges,
) -> Graph:  # fmt: skip
    """The graph with the delays with which a replay gives the recorded times.

    before, launch: a node for each node, or -1. Dependencies on later nodes are dropped. A lag that the recording
    contradicts, because clocks are coarse, gets smaller.
    """
    nodes = np.arange(len(start))
    chain = [edges(ends(before), nodes, before_lag, BEFORE), edges(2 * launch, nodes, launch_lag, LAUNCH)]
    found = merged([*chain, others.keep(others.source_node < others.target)])
    known = (found.source >= 0) & (found.source_node < found.target)
    source = np.where(known, found.source, 0)
    times = np.stack([start, start + duration], axis=1).ravel()
    lag = np.where(known, np.minimum(found.lag, start[found.target] - times[source]), -np.inf)
    ready = np.full(len(start), -np.inf)
    np.maximum.at(ready, found.target, times[source] + lag)
    delay = np.where(np.isinf(ready), start, start - ready)
    return Graph(is_device, start, duration, found._replace(source=source, lag=lag), delay)


def order_of(graph: Graph) -> list[int]:
    """Return an order in which each node comes after all that it depends on, that of the recording if possible.

    Raises CycleError: nodes wait for each other.
    """
    order = np.argsort(graph.start, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    kept = graph.edges.lag > -np.inf
    source, target = graph.edges.source_node[kept], graph.edges.target[kept]
    if (place[source] < place[target]).all():
        return order.tolist()
    sorter = TopologicalSorter(dict.fromkeys(order.tolist(), ()))
    for one, other in zip(source.tolist(), target.tolist(), strict=True):
        sorter.add(other, one)
    return [*sorter.static_order()]


def replay(graph: Graph) -> Times:
    """Return the times of all nodes.

    Raises CycleError: nodes wait for each other.
    """
    by_target = np.argsort(graph.edges.target, kind="stable")
    by_target = by_target[graph.edges.lag[by_target] > -np.inf]
    first = np.searchsorted(graph.edges.target[by_target], np.arange(len(graph.start) + 1)).tolist()
    sources, lags = graph.edges.source[by_target].tolist(), graph.edges.lag[by_target].tolist()
    duration, delay = graph.duration.tolist(), graph.delay.tolist()
    times = [0.0] * (2 * len(delay))
    for node in order_of(graph):
        ready = [times[sources[at]] + lags[at] for at in range(first[node], first[node + 1])]
        start = max(ready, default=0.0) + delay[node]
        times[2 * node] = start
        times[2 * node + 1] = start + duration[node]
    return Times(np.array(times[::2]), np.array(times[1::2]), graph.is_device)


def without(rows: Ints) -> Change:
    """Drop edges of the recorded graph."""

    def change(graph: Graph) -> Graph:
        lag = graph.edges.lag.copy()
        lag[rows] = -np.inf
        return replace(graph, edges=graph.edges._replace(lag=lag))

    return change


def shorter(nodes: Ints, us: Floats) -> Change:
    """Shorten nodes by these times."""

    def change(graph: Graph) -> Graph:
        duration = graph.duration.copy()
        duration[nodes] = np.maximum(duration[nodes] - us, 0.0)
        return replace(graph, duration=duration)

    return change


def rewired(rows: Ints, source: Ints) -> Change:
    """Let edges come from other moments; negative: drop them. If nodes would wait for each other, nothing changes."""

    def change(graph: Graph) -> Graph:
        sources, lag = graph.edges.source.copy(), graph.edges.lag.copy()
        sources[rows] = np.maximum(source, 0)
        lag[rows] = np.where(source >= 0, np.where(np.isinf(lag[rows]), 0.0, lag[rows]), -np.inf)
        changed = replace(graph, edges=graph.edges._replace(source=sources, lag=lag))
        try:
            order_of(changed)
        except CycleError:
            return graph
        return changed

    return change
