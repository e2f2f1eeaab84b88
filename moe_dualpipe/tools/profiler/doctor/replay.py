"""Replay a recorded graph of dependencies, as recorded or after a change.

A node is a call of the host, a kernel, a copy or a transfer. It starts when all that it depends on has happened, plus
its own delay, which nothing recorded explains and which every replay keeps. So a replay without a change gives back the
recorded times exactly, and a shorter node never makes another one later. A gain is the difference of two replayed
windows, not a sum of waits: when one wait goes, another often takes its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

_CHUNK = 1 << 16

DATA, ORDER, SYNC, ASSUMED = range(4)
"""Kinds of `Graph.waits`: a transfer or another stream has the input; a start that fits the end of unrelated work; a
call of the host waits for the device; an input that was there in time."""


class Waits(NamedTuple):
    """Dependencies besides order and launches: node `target` starts at least `lag` after the end of node `source`."""

    source: Ints
    target: Ints
    lag: Floats
    kind: Ints

    def keep(self, kept: Mask) -> "Waits":
        return Waits(self.source[kept], self.target[kept], self.lag[kept], self.kind[kept])

    def add(self, source: Sequence[int], target: Sequence[int], lag: float, kind: int) -> "Waits":
        """Return these and further dependencies."""
        return merged([self, Waits(
            np.array(source, np.int64), np.array(target, np.int64), np.full(len(source), lag),
            np.full(len(source), kind, np.int64),
        )])  # fmt: skip


def merged(parts: Sequence[Waits]) -> Waits:
    """All dependencies of `parts`."""
    return Waits(
        np.concatenate([part.source for part in parts]), np.concatenate([part.target for part in parts]),
        np.concatenate([part.lag for part in parts]), np.concatenate([part.kind for part in parts]),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in the order of their recorded starts. Times in microseconds.

    A node starts at the latest of: the end of the node before it in its stream or thread, plus `before_lag`; the start
    of its launch, plus `launch_lag`; the ends in `waits`; all plus `delay`; and the start of its node in `queue`. The
    index -1 means that there is none.
    """

    is_device: Mask
    start: Floats
    """As recorded."""
    duration: Floats
    before: Ints
    before_lag: Floats
    launch: Ints
    launch_lag: Floats
    waits: Waits
    delay: Floats
    """For nodes without any dependency, the recorded start."""
    queue: Ints | None = None
    """The node that must have started before, because it is before in a hardware queue. None: no such nodes."""

    @property
    def recorded(self) -> "Times":
        return Times(self.start, self.start + self.duration, self.is_device)


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


def with_delays(graph: Graph) -> Graph:
    """Set all delays so that the replay of `graph` gives the recorded times.

    A dependency that the recording contradicts, because clocks are coarse, gets a smaller lag.
    """
    end = graph.start + graph.duration
    ready = np.full(len(end), -np.inf)

    def after(source: Ints, times: Floats, lag: Floats) -> Floats:
        known = source >= 0
        fitted = np.where(known, np.minimum(lag, graph.start - times[source]), 0.0)
        np.maximum(ready, np.where(known, times[source] + fitted, -np.inf), out=ready)
        return fitted

    before_lag = after(graph.before, end, graph.before_lag)
    launch_lag = after(graph.launch, graph.start, graph.launch_lag)
    source, target, lag, _ = graph.waits
    lag = np.minimum(lag, graph.start[target] - end[source])
    np.maximum.at(ready, target, end[source] + lag)
    delay = np.where(np.isinf(ready), graph.start, graph.start - ready)
    waits = graph.waits._replace(lag=lag)
    return replace(graph, before_lag=before_lag, launch_lag=launch_lag, waits=waits, delay=delay)


def order_of(graph: Graph) -> Ints | None:
    """Return an order in which each node comes after all that it depends on; None if there is none."""
    node = np.arange(len(graph.start))
    kept = graph.waits.keep(graph.waits.lag > -np.inf)
    columns = [column for column in (graph.before, graph.launch, graph.queue) if column is not None]
    if all((column < node).all() for column in columns) and (kept.source < kept.target).all():
        return node
    source = np.concatenate([*(column[column >= 0] for column in columns), kept.source])
    target = np.concatenate([*(node[column >= 0] for column in columns), kept.target])
    left = np.bincount(target, minlength=len(node)).tolist()
    by_source = np.argsort(source, kind="stable")
    first = np.searchsorted(source[by_source], np.arange(len(node) + 1)).tolist()
    targets = target[by_source].tolist()
    order = [i for i, count in enumerate(left) if not count]
    for done in order:
        for following in targets[first[done] : first[done + 1]]:
            left[following] -= 1
            if not left[following]:
                order.append(following)
    return np.array(order, np.int64) if len(order) == len(node) else None


def replay(graph: Graph) -> Times:
    """Return the times of all nodes.

    Raises CycleError: nodes wait for each other.
    """
    order = order_of(graph)
    if order is None:
        raise CycleError("the nodes of the graph wait for each other")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    found = _replay_in_order(renumbered(graph, order, place))
    return Times(found.start[place], found.end[place], graph.is_device)


def renumbered(graph: Graph, order: Ints, place: Ints) -> Graph:
    """The graph with its nodes in another order. place: the new number of each node."""
    if (order == np.arange(len(order))).all():
        return graph
    waits = graph.waits.keep(graph.waits.lag > -np.inf)

    def moved(column: Ints) -> Ints:
        return np.where(column >= 0, place[column], -1)[order]

    return Graph(
        graph.is_device[order], graph.start[order], graph.duration[order], moved(graph.before),
        graph.before_lag[order], moved(graph.launch), graph.launch_lag[order],
        waits._replace(source=place[waits.source], target=place[waits.target]), graph.delay[order],
        None if graph.queue is None else moved(graph.queue),
    )  # fmt: skip


def _replay_in_order(graph: Graph) -> Times:
    """One pass in the order of the graph."""
    order = np.argsort(graph.waits.target, kind="stable")
    sources, targets, lags = (column[order].tolist() for column in graph.waits[:3])
    targets.append(-1)
    queue = np.full(len(graph.start), -1) if graph.queue is None else graph.queue
    starts: list[float] = []
    ends: list[float] = []
    at = node = 0
    for first in range(0, len(graph.start), _CHUNK):
        columns = graph.before, graph.before_lag, graph.launch, graph.launch_lag, graph.delay, graph.duration, queue
        for before, before_lag, launch, launch_lag, delay, duration, behind in zip(
            *(column[first : first + _CHUNK].tolist() for column in columns), strict=True
        ):
            time = -1e300
            if before >= 0:
                time = ends[before] + before_lag
            if launch >= 0 and (other := starts[launch] + launch_lag) > time:
                time = other
            while targets[at] == node:
                if (other := ends[sources[at]] + lags[at]) > time:
                    time = other
                at += 1
            time = delay if time == -1e300 else time + delay
            if behind >= 0 and (other := starts[behind]) > time:
                time = other
            starts.append(time)
            ends.append(time + duration)
            node += 1
    return Times(np.array(starts), np.array(ends), graph.is_device)
