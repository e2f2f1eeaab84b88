"""Find the causes of lost time on one or more devices, and rank them by what their removal would save.

Each cause changes the graph of recorded dependencies; the gain is how much shorter the replayed window is. Two
causes may claim the same time, so gains do not add up.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..matching import Meeting
from ..trace import DeviceEvent, Trace
from .case import Case, Finding, case_of
from .causes import contention, exposed, host, order, streams, transfers
from .causes import thread_order as segments
from .ranks import join, meetings_of
from .threads import case_of_threads
from .verdict import Verdict
from .view import view_of
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
    found_host = segments.find(case) if view.is_cpu else [*host.find_syncs(case, trace), *host.find_late_host(case)]
    others = [*order.find(case), *streams.find(case), *exposed.find_pipeline(case)]
    return Examined(device, name, case, found_host, others)


def conclude(examined: Sequence[Examined | None], meetings: Sequence[Meeting] = ()) -> list[tuple[Verdict, ...]]:
    """Return the verdicts of each device; an entry of None has none.

    meetings: collectives that several devices recorded.
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
    ranks = iter(range(len(known)))
    return [() if one is None else _ranked(one, repairs, rank := next(ranks), found[rank]) for one in examined]


def diagnose(trace: Trace, device: str, kind_of: Callable[[DeviceEvent], str]) -> tuple[Verdict, ...]:
    """Return the causes of lost time on one device, largest gain first."""
    return conclude([examine(trace, device, kind_of)])[0]


def _ranked(one: Examined, repairs: Repairs, rank: int, found: Mapping[Cause, Finding]) -> tuple[Verdict, ...]:
    """The verdicts on one rank.

    One cause may follow from another. Late launches of the host count only if they would also be late without the calls
    that wait for the device. A late launch of a transfer counts only if the transfer would also be late without all
    causes of the host and without shared queues.
    """
    case = repairs.cases[rank]
    least = LEAST_SHARE * case.window_us
    of_host = [*found][: len(one.host)]
    kept: dict[Cause, Verdict] = {}
    for cause, finding in found.items():
        before: list[Cause] = []
        if cause in of_host:
            before = of_host[: of_host.index(cause)]
        elif cause[0] == "late-launch":
            before = [other for other in kept if other in of_host or other[0] == "few-queues"]
        gain = repairs.gain_of(rank, [cause])
        if gain < least or (before and repairs.gain_of(rank, [*before, cause]) - repairs.gain_of(rank, before) < least):
            continue
        kept[cause] = replace(finding.verdict, gain_us=gain, gain_fraction=gain / case.window_us)
    ranked = sorted(kept.values(), key=lambda verdict: -(verdict.gain_us or 0.0))
    rest = exposed.find_nothing_else(case, repairs.times(rank, kept))
    return tuple(replace(verdict, device=one.device) for verdict in (*ranked, *(finding.verdict for finding in rest)))
