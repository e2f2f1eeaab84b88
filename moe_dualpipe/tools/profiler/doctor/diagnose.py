"""Find the causes of lost time on one or more devices, sort them by their gains, and report the unexplained rest.

The removal of a cause changes the graph of recorded dependencies; the gain is how much shorter the replayed window is.
Two causes may claim the same time, so gains do not add up. A cause explains the entries of the account in which it
costs time. All causes together also explain gaps that disappear in a replay without them. The rest is unexplained.

All ranks run one program, so a cause is removed on all ranks that have it. Then the ranks are replayed together: a rank
that gets faster still waits for the others. If these waits are what is removed, or if they form a cycle, each rank is
replayed alone.
"""

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from graphlib import CycleError

import numpy as np

from ..account import COMPUTATION, LEAST_SHARE, LOST, SLOWED, Entry, relabeled, spans_of, totals
from ..analyze import Analysis
from ..intervals import EMPTY, Intervals, intersection, union, union_length
from ..ranks import RankComparison
from ..trace import Trace
from . import launching, order, transfers
from .device import Device, FoundCause
from .joint import JointGraph, join, shared_collectives
from .replay import Graph, NodeTimes, shorter
from .slowdown import beside_us, cause_of, slowdowns_of

ROUNDS = 10
"""Maximum number of replays until computation and transfers that slow each other down have stable times."""
SETTLED = 0.003
"""Times are stable if all durations together change by less than this share of the window."""

Causes = dict[str, FoundCause]
"""The causes on one device, by their keys in CAUSES."""


def diagnose(
    traces: Sequence[Trace], analyses: Sequence[Analysis], rank_names: Sequence[str],
    comparison: RankComparison,
) -> list[Analysis]:  # fmt: skip
    """Return the analyses with slowed computation in their accounts, causes of lost time, and what these leave.

    All are of the same devices. The window of a device must not be empty.
    """
    ranks = Ranks([Device(trace) for trace in traces], rank_names, comparison)
    every = range(len(traces))
    causes = [ranks.costly(rank) for rank in every]
    repaired = [ranks.times(causes[rank])[rank] for rank in every]
    for rank, times in enumerate(repaired):
        least_us = LEAST_SHARE * ranks.devices[rank].window_us
        explained = ranks.explained(rank, causes[rank], times)
        rest = _by_key(transfers.find_nothing_else(ranks.devices[rank], times, explained, least_us))
        ranks.found[rank] |= rest
        causes[rank] += rest
    return [_diagnosis(ranks, rank, causes[rank], repaired[rank], analyses[rank]) for rank in every]


def _by_key(causes: Iterable[FoundCause]) -> Causes:
    return {cause.key: cause for cause in causes}


def _diagnosis(
    ranks: "Ranks", rank: int, causes: Sequence[str], repaired: NodeTimes, analysis: Analysis
) -> Analysis:  # fmt: skip
    """causes: those that cost enough. repaired: the times without them."""
    device, found = ranks.devices[rank], ranks.found[rank]
    origin, window = device.origin, device.window_us
    slowed = [cause.spans for cause in found.values() if cause.verdict.kind == "starved-computation"]
    spans = union(np.concatenate([EMPTY, *slowed])) + origin
    slow = [Entry(start, end, SLOWED) for start, end in spans.tolist()]
    entries = tuple(relabeled(analysis.account, slow, [COMPUTATION]))
    lost, lost_without_slowed = (spans_of(entries, *kinds) - origin for kinds in (LOST, LOST[1:]))
    verdicts = []
    for cause in causes:
        verdict, change = found[cause].verdict, found[cause].change
        explains = lost if verdict.kind == "starved-computation" else lost_without_slowed
        share = union_length(intersection(explains, found[cause].spans)) / window
        gain = ranks.gain_of(rank, [cause]) if change else None
        fraction = None if gain is None else gain / window
        verdicts.append(replace(verdict, share=share, gain_us=gain, gain_fraction=fraction))
    verdicts.sort(key=lambda verdict: -(verdict.gain_us or 0.0))
    explained = ranks.explained(rank, causes, repaired) + origin
    explained_spans = [Entry(start, end, COMPUTATION) for start, end in explained.tolist()]
    left = tuple(total for total in totals(relabeled(entries, explained_spans, LOST)) if total.kind in LOST)
    return replace(analysis, account=entries, verdicts=tuple(verdicts), unexplained=left)


def _repaired_gaps(device: Device, repaired: NodeTimes) -> Intervals:
    """The gaps without computation that are at most half as long in a replay without all causes."""
    events = device.computing
    start, end = repaired.start[events], repaired.end[events]
    recorded = np.maximum.accumulate(device.end[events])
    order = np.argsort(start, kind="stable")
    reached = np.empty(len(events))
    reached[order[1:]] = np.maximum.accumulate(end[order])[:-1]
    reached[order[:1]] = start[order[:1]]
    gaps = np.stack([recorded[:-1], device.start[events][1:]], axis=1)
    return union(gaps[(start - reached)[1:] <= 0.5 * (gaps[:, 1] - gaps[:, 0])])


class Ranks:
    """All ranks with their causes, and how long the window of each would be without some of the causes."""

    def __init__(self, devices: Sequence[Device], names: Sequence[str], comparison: RankComparison):
        self.devices, self.shared = devices, shared_collectives(devices, comparison.meetings)
        join(devices, self.shared)
        self.slowdowns = slowdowns_of(devices, self.shared)
        self.found, self.of_host = list[Causes](), list[list[str]]()
        for device, own in zip(devices, self.slowdowns, strict=True):
            slowed_us = sum((slowdown.excess_us for slowdown in own), np.zeros(len(device.events)))
            of_host, of_transfers = launching.find(device), transfers.find(device, names, slowed_us)
            slowed = [cause_of(device, slowdown) for slowdown in own]
            self.of_host.append([cause.key for cause in of_host])
            self.found.append(_by_key([*of_host, *order.find(device), *of_transfers, *slowed]))
        self.windows: dict[frozenset[str], list[float]] = {}
        self.alone = self.joint = JointGraph(devices, self.shared[:0], [0.0] * len(devices))
        with suppress(CycleError):
            if len(self.shared):
                self.joint = JointGraph(devices, self.shared, [shift or 0.0 for shift in comparison.shifts_us])

    def costly(self, rank: int) -> list[str]:
        """The causes on one rank that cost enough.

        One cause may follow from another. Late launches of the host count only if they would also be late without the
        calls that wait for the device. A late launch of a transfer counts only if the transfer would also be late
        without all causes of the host and without shared queues. Other causes also count if they would cost enough
        without those that count already, which hide them.
        """
        least, of_host = LEAST_SHARE * self.devices[rank].window_us, self.of_host[rank]
        costly: list[str] = []
        for cause, found in self.found[rank].items():
            before: list[str] = []
            if cause in of_host:
                before = of_host[: of_host.index(cause)]
            elif cause == "late-launch":
                before = [other for other in costly if other in of_host or other == "few-queues"]
            gain = self.gain_of(rank, [cause]) if found.change else found.verdict.cost_us
            if gain >= least and before and found.change:
                gain = self.gain_of(rank, [*before, cause]) - self.gain_of(rank, before)
            if gain >= least:
                costly.append(cause)
        if not costly:  # nothing hides the others
            return []
        follows = {*costly, *of_host, "late-launch"}
        hidden = [cause for cause, found in self.found[rank].items() if found.change and cause not in follows]
        for cause in hidden:
            if self.gain_of(rank, [*costly, cause]) - self.gain_of(rank, costly) >= least:
                costly.append(cause)
        return costly

    def gain_of(self, rank: int, causes: Collection[str]) -> float:
        """By how much the window of a rank gets shorter without these causes."""
        chosen = frozenset(causes)
        if chosen not in self.windows:
            self.windows[chosen] = [times.window_us for times in self.times(chosen)]
        return self.devices[rank].graph.recorded.window_us - self.windows[chosen][rank]

    def explained(self, rank: int, causes: Collection[str], repaired: NodeTimes) -> Intervals:
        """When these causes cost time on a rank, and the gaps that disappear without them."""
        gaps, found = _repaired_gaps(self.devices[rank], repaired), self.found[rank]
        return union(np.concatenate([gaps, *(found[cause].spans for cause in causes)]))

    def times(self, causes: Collection[str]) -> list[NodeTimes]:
        """When everything on all ranks happens without these causes."""
        kinds = {cause.partition("/")[0] for cause in causes}
        with suppress(CycleError):
            return self._settled(causes, kinds, self.alone if "imbalance" in kinds else self.joint)
        return self._settled(causes, kinds, self.alone)

    def _settled(self, causes: Collection[str], kinds: set[str], joint: JointGraph) -> list[NodeTimes]:
        """Replay several times. Each replay applies the slowdowns that follow from the times of the previous one.

        Only half of each difference is applied, so that durations and times do not oscillate.
        """
        left = [[one for one in own if one.cause not in kinds] for own in self.slowdowns]
        changed = [self._changed(rank, causes) for rank in range(len(self.devices))]
        graphs, times = changed, joint.replay(changed)
        for _ in range(ROUNDS if causes and any(left) else 0):
            moving = [
                np.maximum(graph.duration[: len(device.events)] - ("imbalance" not in kinds) * device.waited_us, 0.0)
                for device, graph in zip(self.devices, graphs, strict=True)
            ]
            beside = beside_us(self.devices, times, moving, joint.event_CR)
            slowed = []
            for i, device in enumerate(self.devices):
                less = [one.k * (one.beside_us - beside[one.is_comm][i]) for one in left[i]]
                less_us = np.sum([np.zeros(len(device.events)), *less], axis=0)
                slowed.append(shorter(changed[i], np.arange(len(less_us)), less_us))
            off = [np.abs(one.duration - other.duration).sum() for one, other in zip(graphs, slowed, strict=True)]
            if all(us <= SETTLED * when.window_us for us, when in zip(off, times, strict=True)):
                break
            graphs = [
                replace(one, duration=(one.duration + other.duration) / 2)
                for one, other in zip(graphs, slowed, strict=True)
            ]
            times = joint.replay(graphs)
        return times

    def _changed(self, rank: int, causes: Collection[str]) -> Graph:
        """The graph of one rank without these causes."""
        graph = self.devices[rank].graph
        for cause, found in self.found[rank].items():
            if cause in causes and found.change is not None:
                graph = found.change(graph)
        return graph
