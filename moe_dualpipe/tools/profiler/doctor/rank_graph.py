"""One graph of several ranks that wait for each other in collectives.

A rank that gets faster waits longer in its next collective if another rank stays slow. In the graph of one rank, a
collective takes as long as recorded, waits included. Here, it has three parts:

    join   this rank has joined; one node for each rank
    hub    all ranks have joined; one node for all ranks
    move   the time that the collective takes from then on; one node for each rank

    rank 0   join --.         .--> move --> what follows on rank 0
                     >--> hub
    rank 1   join --'         '--> move --> what follows on rank 1

The clocks of the ranks may differ. They are aligned by the ends of collectives, which are the same on all ranks.
"""

from collections.abc import Sequence

import numpy as np

from .case import Case
from .ranks import Met
from .replay import DATA, Floats, Graph, Ints, Mask, Times, Waits, merged, renumbered, replay


class JointGraph:
    """Nodes are numbered: first those of rank 0, of rank 1 and so on, then the hubs, then the moves.

    Raises CycleError if the waits of the ranks for each other form a cycle.
    """

    def __init__(self, cases: Sequence[Case], meetings: Sequence[Met]):
        self.recorded = [case.graph for case in cases]
        self.first = np.cumsum([0, *(len(graph.start) for graph in self.recorded)])
        self.shift = _clock_shifts(cases, meetings)
        parts = list(zip(*(self._parts(cases, met) for met in meetings), strict=True))
        joins, own, lag = (np.concatenate([part.ravel() for part in column]) for column in parts[:3])
        self.joins: Ints = joins
        self.own_us: Floats = own
        self.lag: Floats = lag
        """The time from hub to move. Not 0 if clocks or recorded ends differ a little."""
        counts = np.cumsum([0, *(met.events_Mn.shape[1] for met in meetings)])
        hubs = [np.tile(np.arange(first, last), len(met.ranks_M)) for met, first, last in
                zip(meetings, counts[:-1], counts[1:], strict=True)]  # fmt: skip
        self.hub_of: Ints = self.first[-1] + np.concatenate(hubs)
        self.num_hubs = int(counts[-1])
        first_move = int(self.first[-1]) + self.num_hubs
        self.end_of = np.arange(first_move + len(joins))
        """The node with which each node ends: for joins, their move."""
        self.end_of[joins] = np.arange(first_move, len(self.end_of))
        self.order = np.argsort(self._times(), kind="stable")
        self.place = np.empty_like(self.order)
        self.place[self.order] = np.arange(len(self.order))
        self.replay(self.recorded)

    def _parts(self, cases: Sequence[Case], met: Met) -> tuple[Ints, Floats, Floats]:
        """The joins of all ranks, the durations of their moves, and the lags of these. Shapes [M, n]."""
        nodes = [cases[rank].nodes.event[events] for rank, events in zip(met.ranks_M, met.events_Mn, strict=True)]
        starts = [cases[r].graph.start[own] + self.shift[r] for r, own in zip(met.ranks_M, nodes, strict=True)]
        joins_Mn = np.array(nodes) + self.first[met.ranks_M][:, None]
        starts_Mn, own_Mn = np.array(starts), np.broadcast_to(met.own_us, joins_Mn.shape)
        return joins_Mn, own_Mn, starts_Mn + met.durations_Mn - own_Mn - starts_Mn.max(axis=0)

    def _times(self) -> Floats:
        """The recorded start of each node, on the clock of the first rank."""
        times = np.concatenate([graph.start + shift for graph, shift in zip(self.recorded, self.shift, strict=True)])
        hubs = np.full(self.num_hubs, -np.inf)
        np.maximum.at(hubs, self.hub_of - self.first[-1], times[self.joins])
        return np.concatenate([times, hubs, hubs[self.hub_of - self.first[-1]] + np.maximum(self.lag, 0.0)])

    def replay(self, graphs: Sequence[Graph]) -> list[Times]:
        """Return the times of each rank's nodes. graphs: the changed graphs of the ranks.

        Raises CycleError if the dependencies form a cycle.
        """
        times = replay(renumbered(self._graph(graphs), self.order, self.place))
        start, end = times.start[self.place], times.end[self.place][self.end_of]
        bounds = zip(graphs, self.first[:-1], self.first[1:], strict=True)
        return [Times(start[first:last], end[first:last], graph.is_device) for graph, first, last in bounds]

    def _graph(self, graphs: Sequence[Graph]) -> Graph:
        hubs, moves = self.num_hubs, len(self.joins)

        def column(name: str, of_hubs: float, of_moves: Floats | Ints | float) -> np.ndarray:
            parts = [getattr(graph, name) for graph in graphs]
            return np.concatenate([*parts, np.full(hubs, of_hubs), np.broadcast_to(of_moves, moves)])

        duration = column("duration", 0.0, self.own_us)
        recorded = np.concatenate([graph.duration for graph in self.recorded])
        changed = duration[self.joins] - recorded[self.joins]
        duration[-moves:] = np.maximum(self.own_us + changed, 0.0)
        duration[self.joins] = 0.0
        firsts = list(zip(graphs, self.first[:-1], strict=True))
        before = [np.where(graph.before >= 0, self.end_of[first + graph.before], -1) for graph, first in firsts]
        launch = [np.where(graph.launch >= 0, first + graph.launch, -1) for graph, first in firsts]
        queues = [np.full(len(graph.start), -1) if graph.queue is None else graph.queue for graph in graphs]
        queue = [np.where(queue >= 0, first + queue, -1) for queue, first in zip(queues, self.first[:-1], strict=True)]
        waits = [
            graph.waits._replace(source=self.end_of[first + graph.waits.source], target=first + graph.waits.target)
            for graph, first in firsts
        ]  # fmt: skip
        waits.append(Waits(self.joins, self.hub_of, np.zeros(moves), np.full(moves, DATA, np.int64)))
        delay = [graph.delay + shift * _has_no_input(graph) for graph, shift in zip(graphs, self.shift, strict=True)]
        none, nothing = np.full(hubs, -1), np.full(hubs + moves, -1)
        return Graph(
            column("is_device", 0, 0).astype(bool), column("start", 0.0, 0.0), duration,
            np.concatenate([*before, none, self.hub_of]), column("before_lag", 0.0, self.lag),
            np.concatenate([*launch, nothing]), column("launch_lag", 0.0, 0.0),
            merged(waits), np.concatenate([*delay, np.zeros(hubs + moves)]), np.concatenate([*queue, nothing]),
        )  # fmt: skip


def _has_no_input(graph: Graph) -> Mask:
    found = (graph.before < 0) & (graph.launch < 0)
    found[graph.waits.target[graph.waits.lag > -np.inf]] = False
    return found


def _clock_shifts(cases: Sequence[Case], meetings: Sequence[Met]) -> Floats:
    """What to add to the times of each rank so that collectives end together: the median difference to a known rank."""
    shift = np.full(len(cases), np.nan)
    for number in range(len(cases)):
        if np.isnan(shift[number]):
            shift[number] = 0.0
            queue = [number]
            for known in queue:
                for met in meetings:
                    if known in met.ranks_M:
                        ends_Mn = [cases[r].view.end[e] for r, e in zip(met.ranks_M, met.events_Mn, strict=True)]
                        own = ends_Mn[met.ranks_M.tolist().index(known)]
                        for rank, ends in zip(met.ranks_M.tolist(), ends_Mn, strict=True):
                            if np.isnan(shift[rank]):
                                shift[rank] = shift[known] + float(np.median(own - ends))
                                queue.append(rank)
    return shift
