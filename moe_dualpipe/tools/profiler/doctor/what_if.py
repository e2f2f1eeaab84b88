"""How long the window of each rank would be without some of the causes.

All ranks run one program, so a cause is removed on all ranks that have it. Then the ranks are replayed together: a rank
that gets faster still waits for the others. If these waits are what is removed, or if they form a cycle, each rank is
replayed alone.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError

import numpy as np

from .case import Case, Finding, shorter
from .causes.contention import Slowdown, beside_us, slowdown_of
from .rank_graph import JointGraph
from .ranks import Met, largest
from .replay import Floats, Graph, Times, replay

Cause = tuple[str, int]
"""The kind of a verdict, and its number among those of its kind on one device."""
WAITS_FOR_RANKS: Cause = "imbalance", 0

ROUNDS = 10
"""Maximum number of replays until computation and transfers that slow each other down have stable times."""
SETTLED = 0.003
"""Times are stable if all durations together change by less than this share of the window."""


def numbered(findings: Sequence[Finding]) -> dict[Cause, Finding]:
    """The findings of one device by cause."""
    count = Counter[str]()
    found: dict[Cause, Finding] = {}
    for finding in findings:
        kind = finding.verdict.kind
        found[kind, count[kind]] = finding
        count[kind] += 1
    return found


class Repairs:
    def __init__(
        self, cases: Sequence[Case], meetings: Sequence[Met], slowdowns: Sequence[Sequence[Slowdown]],
        found: Sequence[Mapping[Cause, Finding]],
    ):  # fmt: skip
        """slowdowns, found: one for each case."""
        self.cases, self.meetings, self.slowdowns, self.found = cases, meetings, slowdowns, found
        self.joint = _joint(cases, meetings)
        self.windows: dict[frozenset[Cause], list[float] | None] = {}

    def gain_of(self, rank: int, causes: Collection[Cause]) -> float:
        """By how much the window of a rank gets shorter without these causes."""
        chosen = frozenset(causes)
        recorded = self.cases[rank].graph.recorded.window_us
        if self.joint is None or WAITS_FOR_RANKS in chosen:
            return recorded - self._alone(rank, chosen).window_us
        if chosen not in self.windows:
            together = self._together(chosen)
            self.windows[chosen] = None if together is None else [times.window_us for times in together]
        windows = self.windows[chosen]
        return recorded - (self._alone(rank, chosen).window_us if windows is None else windows[rank])

    def times(self, rank: int, causes: Collection[Cause]) -> Times:
        """When everything on a rank happens without these causes."""
        chosen = frozenset(causes)
        together = None if WAITS_FOR_RANKS in chosen else self._together(chosen)
        return self._alone(rank, chosen) if together is None else together[rank]

    def _alone(self, rank: int, causes: frozenset[Cause]) -> Times:
        [times] = self._settled([rank], causes, (), lambda graphs: [replay(graph) for graph in graphs])
        return times

    def _together(self, causes: frozenset[Cause]) -> list[Times] | None:
        """The times of all ranks; None if the waits of the ranks for each other form a cycle."""
        if self.joint is None:
            return None
        try:
            return self._settled(range(len(self.cases)), causes, self.meetings, self.joint.replay)
        except CycleError:
            return None

    def _settled(
        self, ranks: Sequence[int], causes: frozenset[Cause], meetings: Sequence[Met],
        replayed: Callable[[Sequence[Graph]], list[Times]],
    ) -> list[Times]:  # fmt: skip
        """Replay several times. Each replay applies the slowdowns that follow from the times of the previous one.

        Only half of each difference is applied, so that durations and times do not oscillate.
        """
        changed = [self._changed(rank, causes) for rank in ranks]
        left = [[one for one in self.slowdowns[rank] if (one.kind, 0) not in causes] for rank in ranks]
        graphs, times = changed, replayed(changed)
        for _ in range(ROUNDS if causes and any(left) else 0):
            slowed = self._slowed(ranks, causes, meetings, left, changed, graphs, times)
            off = [np.abs(one.duration - other.duration).sum() for one, other in zip(graphs, slowed, strict=True)]
            if all(us <= SETTLED * when.window_us for us, when in zip(off, times, strict=True)):
                break
            graphs = [
                replace(one, duration=(one.duration + other.duration) / 2)
                for one, other in zip(graphs, slowed, strict=True)
            ]
            times = replayed(graphs)
        return times

    def _slowed(
        self, ranks: Sequence[int], causes: frozenset[Cause], meetings: Sequence[Met],
        slowdowns: Sequence[Sequence[Slowdown]], changed: Sequence[Graph], graphs: Sequence[Graph],
        times: Sequence[Times],
    ) -> list[Graph]:  # fmt: skip
        """The graphs `changed`, with durations as the `slowdowns` make them if `graphs` run at these times."""
        cases = [self.cases[rank] for rank in ranks]
        moving = [self._moving(rank, causes, graph) for rank, graph in zip(ranks, graphs, strict=True)]
        beside = {is_comm: _beside(cases, is_comm, times, moving, meetings) for is_comm in (True, False)}
        found = []
        for i, case in enumerate(cases):
            less = [one.k * (one.beside_us - beside[one.is_comm][i]) for one in slowdowns[i]]
            found.append(shorter(case.nodes.event, sum(less, np.zeros(len(case.view.events))))(changed[i]))
        return found

    def _changed(self, rank: int, causes: frozenset[Cause]) -> Graph:
        graph = self.cases[rank].graph
        for cause, finding in self.found[rank].items():
            if cause in causes and finding.change is not None:
                graph = finding.change(graph)
        for cause, finding in self.found[rank].items() if causes else ():
            if cause not in causes and finding.stays is not None:
                graph = finding.stays(graph)
        return graph

    def _moving(self, rank: int, causes: frozenset[Cause], graph: Graph) -> Floats:
        """How long each event of a changed graph takes without waits for other ranks."""
        case = self.cases[rank]
        waited = 0.0 if WAITS_FOR_RANKS in causes else case.view.duration - case.own_us
        return np.maximum(graph.duration[case.nodes.event] - waited, 0.0)


def slowdowns_of(cases: Sequence[Case], meetings: Sequence[Met]) -> list[list[Slowdown]]:
    """How much transfers and computation slow each other down on each rank."""
    recorded, own = [case.graph.recorded for case in cases], [case.own_us for case in cases]
    found: list[list[Slowdown]] = [[] for _ in cases]
    for is_comm in (True, False):
        for rank, beside in enumerate(_beside(cases, is_comm, recorded, own, meetings)):
            slowdown = slowdown_of(cases[rank], is_comm, beside)
            found[rank] += [] if slowdown is None else [slowdown]
    return found


def _beside(
    cases: Sequence[Case], is_comm: bool, times: Sequence[Times], moving: Sequence[Floats], meetings: Sequence[Met]
) -> list[Floats]:  # fmt: skip
    """For how long each event runs beside the other kind. For a collective: on the rank where this is longest."""
    own = [beside_us(case, is_comm, when, us) for case, when, us in zip(cases, times, moving, strict=True)]
    return largest(own, meetings) if is_comm else own


def _joint(cases: Sequence[Case], meetings: Sequence[Met]) -> JointGraph | None:
    try:
        return JointGraph(cases, meetings) if meetings else None
    except CycleError:
        return None
