"""Find the causes of lost time on one or more devices, rank them by what their removal would save, say what is left.

Each cause changes the graph of recorded dependencies; the gain is how much shorter the replayed window is. Two
causes may claim the same time, so gains do not add up. A cause explains the entries of the account in which it costs
time; all causes together also explain what is gone in a replay without them. The rest is unexplained.

All ranks run one program, so a cause is removed on all ranks that have it. Then the ranks are replayed together: a rank
that gets faster still waits for the others. If these waits are what is removed, or if they form a cycle, each rank is
replayed alone.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from graphlib import CycleError
from typing import NamedTuple

import numpy as np

from ..account import COMPUTATION, LOST, SLOWED, Entry, Total, relabeled, spans_of, totals
from ..intervals import EMPTY, Intervals, intersection, union, union_length
from ..ranks import RankComparison
from ..trace import DeviceEvent, Trace
from .case import Case, Finding
from .causes import exposed, host, order, transfers
from .causes.transfers import Slowdown, beside_us, slowdown_of
from .dependencies import graph_of
from .ranks import JointGraph, Met, join, largest, meetings_of
from .replay import Floats, Graph, Times, replay, shorter
from .threads import case_of_threads
from .verdict import Verdict
from .view import COMPUTE, view_of

LEAST_SHARE = 0.01
"""Causes that would save a smaller share of the window are left out."""
ROUNDS = 10
"""Maximum number of replays until computation and transfers that slow each other down have stable times."""
SETTLED = 0.003
"""Times are stable if all durations together change by less than this share of the window."""

Cause = tuple[str, int]
"""The kind of a verdict, and its number among those of its kind on one device."""
Causes = dict[Cause, Finding]
WAITS_FOR_RANKS: Cause = "imbalance", 0


class Examined(NamedTuple):
    """A device, and the causes that its own trace shows without those of other ranks."""

    name: str
    case: Case
    host: list[Finding]
    others: list[Finding]


def examine(trace: Trace, device: str, kind_of: Callable[[DeviceEvent], str], name: str = "") -> Examined | None:
    """Look at one device. Returns None if its window is empty. name: the name of its rank in other ranks' verdicts."""
    view = view_of(trace, device, kind_of)
    case = case_of_threads(view, trace) if view.is_cpu else Case(view, *graph_of(view))
    if not case.window_us > 0:
        return None
    return Examined(name, case, host.find(case, trace), [*order.find(case), *exposed.find(case)])


class Diagnosis(NamedTuple):
    """What is said about one device."""

    verdicts: tuple[Verdict, ...]
    account: tuple[Entry, ...]
    """With slowed computation."""
    unexplained: tuple[Total, ...]
    """Lost time that no verdict explains, largest first."""


def conclude(
    examined: Sequence[Examined | None], accounts: Sequence[Sequence[Entry]], comparison: RankComparison
) -> list[Diagnosis]:  # fmt: skip
    """Return the verdicts on each device; an entry of None has none.

    accounts: of each device. comparison: of all devices.
    """
    known = [one for one in examined if one is not None]
    names = {number: one.name for number, one in enumerate(known)}
    shifts = [shift or 0.0 for one, shift in zip(examined, comparison.shifts_us, strict=True) if one is not None]
    met = meetings_of([one.case for one in known], comparison.meetings)
    joined = [*join([one.case for one in known], met)]
    cases = [case for case, _ in joined]
    slowdowns, found = slowdowns_of(cases, met), list[Causes]()
    for one, (case, last), own in zip(known, joined, slowdowns, strict=True):
        slowed_us = sum((slowdown.excess_us for slowdown in own), np.zeros(len(case.view.events)))
        of_transfers = transfers.find(case, names, last, slowed_us)
        slowed = [transfers.of_slowdown(case, slowdown) for slowdown in own]
        found.append(_numbered([*one.host, *one.others, *of_transfers, *slowed]))
    repairs = Repairs(cases, met, slowdowns, found, shifts)
    kept, mended = list[list[Cause]](), list[Times]()
    for rank, (one, case) in enumerate(zip(known, cases, strict=True)):
        causes = _kept(one, repairs, rank)
        times = repairs.times(causes)[rank]
        rest = _numbered(exposed.find_nothing_else(case, times, LEAST_SHARE * case.window_us))
        found[rank] |= rest
        kept.append([*causes, *rest])
        mended.append(times)
    ranks = iter(range(len(known)))
    return [
        Diagnosis((), tuple(entries), tuple(_lost(entries, EMPTY)))
        if one is None else _diagnosis(repairs, rank := next(ranks), kept[rank], mended[rank], entries)
        for one, entries in zip(examined, accounts, strict=True)
    ]  # fmt: skip


def _numbered(findings: Sequence[Finding]) -> Causes:
    """The findings of one device by cause."""
    count = Counter[str]()
    found: Causes = {}
    for finding in findings:
        kind = finding.verdict.kind
        found[kind, count[kind]] = finding
        count[kind] += 1
    return found


def _kept(one: Examined, repairs: "Repairs", rank: int) -> list[Cause]:
    """The causes on one rank that cost enough.

    One cause may follow from another. Late launches of the host count only if they would also be late without the calls
    that wait for the device. A late launch of a transfer counts only if the transfer would also be late without all
    causes of the host and without shared queues.
    """
    least, found = LEAST_SHARE * repairs.cases[rank].window_us, repairs.found[rank]
    of_host = [*found][: len(one.host)]
    kept: list[Cause] = []
    for cause, finding in found.items():
        before: list[Cause] = []
        if cause in of_host:
            before = of_host[: of_host.index(cause)]
        elif cause[0] == "late-launch":
            before = [other for other in kept if other in of_host or other[0] == "few-queues"]
        gain = repairs.gain_of(rank, [cause]) if finding.change else finding.verdict.cost_us
        if gain >= least and not (
            before
            and repairs.gain_of(rank, [*before, cause]) - repairs.gain_of(rank, before) < least
            and finding.change
        ):
            kept.append(cause)
    return kept


def _diagnosis(
    repairs: "Repairs", rank: int, kept: Sequence[Cause], mended: Times, entries: Sequence[Entry]
) -> Diagnosis:  # fmt: skip
    case, found = repairs.cases[rank], repairs.found[rank]
    slowed = [finding.spans for (kind, _), finding in found.items() if kind == "starved-computation"]
    spans = union(np.concatenate([EMPTY, *slowed])) + case.view.origin
    entries = relabeled(entries, [Entry(start, end, SLOWED) for start, end in spans.tolist()], [COMPUTATION])
    lost, every = (spans_of(entries, *kinds) - case.view.origin for kinds in (LOST, LOST[1:]))
    verdicts = []
    for cause in kept:
        verdict, change = found[cause].verdict, found[cause].change
        of = lost if verdict.kind == "starved-computation" else every
        share = union_length(intersection(of, found[cause].spans)) / case.window_us
        gain = repairs.gain_of(rank, [cause]) if change else None
        fraction = None if gain is None else gain / case.window_us
        verdicts.append(replace(verdict, share=share, gain_us=gain, gain_fraction=fraction))
    verdicts.sort(key=lambda verdict: -(verdict.gain_us or 0.0))
    explained = union(np.concatenate([_mended_gaps(case, mended), *(found[cause].spans for cause in kept)]))
    return Diagnosis(tuple(verdicts), tuple(entries), tuple(_lost(entries, explained + case.view.origin)))


def _lost(entries: Sequence[Entry], explained: Intervals) -> list[Total]:
    """What is lost outside of the `explained` time, largest first."""
    spans = [Entry(start, end, COMPUTATION) for start, end in explained.tolist()]
    return [total for total in totals(relabeled(entries, spans, LOST)) if total.kind in LOST]


def _mended_gaps(case: Case, mended: Times) -> Intervals:
    """The gaps without computation that are at most half as long in a replay without all causes."""
    events = np.flatnonzero(case.view.kind == COMPUTE)
    start, end = mended.start[case.nodes.event[events]], mended.end[case.nodes.event[events]]
    recorded = np.maximum.accumulate(case.view.end[events])
    order = np.argsort(start, kind="stable")
    reached = np.empty(len(events))
    reached[order[1:]] = np.maximum.accumulate(end[order])[:-1]
    reached[order[:1]] = start[order[:1]]
    gaps = np.stack([recorded[:-1], case.view.start[events][1:]], axis=1)
    shorter = (start - reached)[1:] <= 0.5 * (gaps[:, 1] - gaps[:, 0])
    return union(gaps[shorter])


class Repairs:
    """How long the window of each rank would be without some of the causes."""

    def __init__(
        self, cases: Sequence[Case], meetings: Sequence[Met], slowdowns: Sequence[Sequence[Slowdown]],
        found: Sequence[Causes], shifts: Sequence[float],
    ):  # fmt: skip
        """slowdowns, found, shifts (of clocks): one for each case."""
        self.cases, self.meetings, self.slowdowns, self.found = cases, meetings, slowdowns, found
        self.windows: dict[frozenset[Cause], list[float]] = {}
        try:
            self.joint = JointGraph(cases, meetings, shifts) if meetings else None
        except CycleError:
            self.joint = None

    def gain_of(self, rank: int, causes: Collection[Cause]) -> float:
        """By how much the window of a rank gets shorter without these causes."""
        chosen = frozenset(causes)
        if chosen not in self.windows:
            self.windows[chosen] = [times.window_us for times in self.times(chosen)]
        return self.cases[rank].graph.recorded.window_us - self.windows[chosen][rank]

    def times(self, causes: Collection[Cause]) -> list[Times]:
        """When everything on all ranks happens without these causes."""
        if self.joint is not None and WAITS_FOR_RANKS not in causes:
            try:
                return self._settled(causes, self.meetings, self.joint.replay)
            except CycleError:
                pass
        return self._settled(causes, (), lambda graphs: [replay(graph) for graph in graphs])

    def _settled(
        self, causes: Collection[Cause], meetings: Sequence[Met], replayed: Callable[[Sequence[Graph]], list[Times]]
    ) -> list[Times]:  # fmt: skip
        """Replay several times. Each replay applies the slowdowns that follow from the times of the previous one.

        Only half of each difference is applied, so that durations and times do not oscillate.
        """
        left = [[one for one in own if (one.kind, 0) not in causes] for own in self.slowdowns]
        changed = [self._changed(rank, causes) for rank in range(len(self.cases))]
        graphs, times = changed, replayed(changed)
        for _ in range(ROUNDS if causes and any(left) else 0):
            moving = [
                np.maximum(graph.duration[case.nodes.event] - (WAITS_FOR_RANKS not in causes) * case.waited_us, 0.0)
                for case, graph in zip(self.cases, graphs, strict=True)
            ]
            beside = {is_comm: _beside(self.cases, is_comm, times, moving, meetings) for is_comm in (True, False)}
            slowed = []
            for i, case in enumerate(self.cases):
                less = [one.k * (one.beside_us - beside[one.is_comm][i]) for one in left[i]]
                slowed.append(
                    shorter(case.nodes.event, np.sum([np.zeros(len(case.view.events)), *less], axis=0))(changed[i])
                )
            off = [np.abs(one.duration - other.duration).sum() for one, other in zip(graphs, slowed, strict=True)]
            if all(us <= SETTLED * when.window_us for us, when in zip(off, times, strict=True)):
                break
            graphs = [
                replace(one, duration=(one.duration + other.duration) / 2)
                for one, other in zip(graphs, slowed, strict=True)
            ]
            times = replayed(graphs)
        return times

    def _changed(self, rank: int, causes: Collection[Cause]) -> Graph:
        graph = self.cases[rank].graph
        for cause, finding in self.found[rank].items():
            if cause in causes and finding.change is not None:
                graph = finding.change(graph)
        return graph


def slowdowns_of(cases: Sequence[Case], meetings: Sequence[Met]) -> list[list[Slowdown]]:
    """How much transfers and computation slow each other down on each rank."""
    recorded, own = [case.graph.recorded for case in cases], [case.own_us for case in cases]
    beside = {is_comm: _beside(cases, is_comm, recorded, own, meetings) for is_comm in (True, False)}
    found = [[slowdown_of(case, is_comm, beside[is_comm][i]) for is_comm in beside] for i, case in enumerate(cases)]
    return [[one for one in own if one is not None] for own in found]


def _beside(
    cases: Sequence[Case], is_comm: bool, times: Sequence[Times], moving: Sequence[Floats], meetings: Sequence[Met]
) -> list[Floats]:  # fmt: skip
    """For how long each event runs beside the other kind. For a collective: on the rank where this is longest."""
    own = [beside_us(case, is_comm, when, us) for case, when, us in zip(cases, times, moving, strict=True)]
    return largest(own, meetings) if is_comm else own
