"""What the window of each rank becomes when causes are removed.

All ranks run one program, so a cause is removed on all ranks that have it. Then the ranks are replayed together: a rank
that gets faster still waits for the others. Only where ranks no longer wait for each other, each is replayed alone.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from graphlib import CycleError

from .case import Case, Change, Finding
from .joint import JointGraph
from .ranks import Met
from .replay import Graph, Times, replay

Cause = tuple[str, int]
"""The kind of a verdict, and its number among those of its kind on one device."""
WAITS_FOR_RANKS: Cause = "imbalance", 0


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
        self, cases: Sequence[Case], meetings: Sequence[Met], changes: Sequence[Mapping[Cause, Change]]
    ):  # fmt: skip
        """changes: of each case, those that remove its causes."""
        self.cases, self.changes = cases, changes
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

    def _changed(self, rank: int, causes: frozenset[Cause]) -> Graph:
        graph = self.cases[rank].graph
        for cause, change in self.changes[rank].items():
            if cause in causes:
                graph = change(graph)
        return graph

    def _alone(self, rank: int, causes: frozenset[Cause]) -> Times:
        return replay(self._changed(rank, causes))

    def _together(self, causes: frozenset[Cause]) -> list[Times] | None:
        """The times of all ranks; None if the collectives of the ranks would wait for each other."""
        if self.joint is None:
            return None
        try:
            return self.joint.replay([self._changed(rank, causes) for rank in range(len(self.cases))])
        except CycleError:
            return None


def _joint(cases: Sequence[Case], meetings: Sequence[Met]) -> JointGraph | None:
    try:
        return JointGraph(cases, meetings) if meetings else None
    except CycleError:
        return None
