"""Find the causes of lost time on one or more devices, rank them by what their removal would save, say what is left.

Each cause changes the graph of recorded dependencies; the gain is how much shorter the replayed window is. Two
causes may claim the same time, so gains do not add up. A cause explains the entries of the account in which it costs
time; all causes together also explain what is gone in a replay without them. The rest is unexplained.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..account import COMPUTATION, LOST, SLOWED, Entry, Total, relabeled, spans_of, totals
from ..intervals import EMPTY, Intervals, intersection, union, union_length
from ..matching import Meeting
from ..trace import DeviceEvent, Trace
from .case import Case, Finding, case_of
from .causes import contention, copies, exposed, host, order, streams, transfers
from .causes import thread_order as segments
from .ranks import join, meetings_of
from .replay import Times
from .threads import case_of_threads
from .verdict import Verdict
from .view import COMPUTE, view_of
from .what_if import Cause, Repairs, numbered, slowdowns_of

LEAST_SHARE = 0.01
"""Causes that would save a smaller share of the window are left out."""


class Examined(NamedTuple):
    """A device, and the causes that its own trace shows without those of other ranks."""

    device: str
    name: str
    case: Case
    host: list[Finding]
    others: list[Finding]


def examine(trace: Trace, device: str, kind_of: Callable[[DeviceEvent], str], name: str = "") -> Examined | None:
    """Look at one device. Returns None if its window is empty. name: the name of its rank in other ranks' verdicts."""
    view = view_of(trace, device, kind_of)
    case = case_of_threads(view, trace) if view.is_cpu else case_of(view)
    if not case.window_us > 0:
        return None
    found_host = segments.find(case) if view.is_cpu else host.find(case, trace)
    others = [*order.find(case), *streams.find(case), *exposed.find_pipeline(case), *copies.find(case)]
    return Examined(device, name, case, found_host, others)


class Diagnosis(NamedTuple):
    """What is said about one device."""

    verdicts: tuple[Verdict, ...]
    account: tuple[Entry, ...]
    """With slowed computation."""
    unexplained: tuple[Total, ...]
    """Lost time that no verdict explains, largest first."""


def conclude(
    examined: Sequence[Examined | None], accounts: Sequence[Sequence[Entry]], meetings: Sequence[Meeting] = ()
) -> list[Diagnosis]:  # fmt: skip
    """Return the verdicts on each device; an entry of None has none.

    accounts: of each device. meetings: collectives that several devices recorded.
    """
    known = [one for one in examined if one is not None]
    names = {number: one.name for number, one in enumerate(known)}
    met = meetings_of([one.case for one in known], meetings)
    cases, last = zip(*join([one.case for one in known], met), strict=True) if known else ((), ())
    slowdowns = slowdowns_of(cases, met)
    found = []
    for one, case, joined, own in zip(known, cases, last, slowdowns, strict=True):
        slowed_us = sum((slowdown.excess_us for slowdown in own), np.zeros(len(case.view.events)))
        of_transfers = transfers.find(case, names, joined, slowed_us)
        found.append(numbered([*one.host, *one.others, *of_transfers, *contention.find(case, own)]))
    repairs = Repairs(cases, met, slowdowns, found)
    kept = [_kept(one, repairs, rank, found[rank]) for rank, one in enumerate(known)]
    mended = [repairs.times(rank, causes) for rank, causes in enumerate(kept)]
    for rank, (case, times) in enumerate(zip(cases, mended, strict=True)):
        rest = numbered(exposed.find_nothing_else(case, times, LEAST_SHARE * case.window_us))
        found[rank] |= rest
        kept[rank] += rest
    ranks = iter(range(len(known)))
    return [
        Diagnosis((), tuple(entries), tuple(_lost(entries, EMPTY)))
        if one is None else _diagnosis(one, repairs, rank := next(ranks), kept[rank], mended[rank], entries)
        for one, entries in zip(examined, accounts, strict=True)
    ]  # fmt: skip


def _diagnosis(
    one: Examined, repairs: Repairs, rank: int, kept: Sequence[Cause], mended: Times, entries: Sequence[Entry]
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
        verdicts.append(replace(verdict, share=share, gain_us=gain, gain_fraction=fraction, device=one.device))
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


def diagnose(trace: Trace, device: str, kind_of: Callable[[DeviceEvent], str]) -> tuple[Verdict, ...]:
    """Return the causes of lost time on one device, largest gain first."""
    return conclude([examine(trace, device, kind_of)], [()])[0].verdicts


def _kept(one: Examined, repairs: Repairs, rank: int, found: Mapping[Cause, Finding]) -> list[Cause]:
    """The causes on one rank that cost enough.

    One cause may follow from another. Late launches of the host count only if they would also be late without the calls
    that wait for the device. A late launch of a transfer counts only if the transfer would also be late without all
    causes of the host and without shared queues.
    """
    least = LEAST_SHARE * repairs.cases[rank].window_us
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
