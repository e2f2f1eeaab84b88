"""Find the causes of lost time on one or more devices, and rank them by what their removal would save.

Each cause changes the graph of recorded dependencies; the gain is the difference of the replayed windows. Two causes
may claim the same time: the gains do not add up.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ..meetings import Meeting
from ..trace import DeviceEvent, Trace
from .case import Case, Change, Finding, case_of
from .causes import contention, exposed, host, order, segments, streams, transfers
from .ranks import join
from .threads import case_of_threads
from .verdict import Verdict
from .view import view_of

LEAST_SHARE = 0.01
"""Causes that would save a smaller share of the window are left out."""


class Examined(NamedTuple):
    """A device and what was found in its own trace alone."""

    device: str
    name: str
    case: Case
    host: list[Finding]
    others: list[Finding]


def examine(trace: Trace, device: str, kind_of: Callable[[DeviceEvent], str], name: str = "") -> Examined | None:
    """Look at one device. Returns None for a device without a window. name: of the rank, for other ranks' verdicts."""
    view = view_of(trace, device, kind_of)
    case = case_of_threads(view, trace) if view.is_cpu else case_of(view)
    if not case.window_us > 0:
        return None
    found_host = segments.find(case) if view.is_cpu else [*host.find_syncs(case, trace), *host.find_late_host(case)]
    others = [*order.find(case), *streams.find(case), *exposed.find_pipeline(case)]
    return Examined(device, name, case, found_host, others)


def conclude(examined: Sequence[Examined | None], meetings: Sequence[Meeting] = ()) -> list[tuple[Verdict, ...]]:
    """Return the verdicts of each device. None has no verdicts.

    meetings: the same collectives on several devices.
    """
    known = [one for one in examined if one is not None]
    names = {number: one.name for number, one in enumerate(known)}
    verdicts = []
    joined = iter(join([one.case for one in known], meetings))
    for one in examined:
        if one is None:
            verdicts.append(())
            continue
        case, last = next(joined)
        found = [*transfers.find(case, names, last), *contention.find(case)]
        verdicts.append(_ranked(one, case, found))
    return verdicts


def diagnose(trace: Trace, device: str, kind_of: Callable[[DeviceEvent], str]) -> tuple[Verdict, ...]:
    """Return the causes of lost time on one device, largest gain first."""
    return conclude([examine(trace, device, kind_of)])[0]


def _ranked(one: Examined, case: Case, found: Sequence[Finding]) -> tuple[Verdict, ...]:
    kept = _host(one, case)
    of_host = [finding.change for finding in kept if finding.change is not None]
    for finding in (*one.others, *found):
        # a launch is late by itself only if it would be late without the host's waits
        before = of_host if finding.verdict.kind == "late-launch" else []
        if finding.change is not None and (gained := _with_gain(one, case, finding, before)) is not None:
            kept.append(gained)
    kept.sort(key=lambda finding: -(finding.verdict.gain_us or 0.0))
    _, mended = case.gain_of([finding.change for finding in kept if finding.change is not None])
    without_gain = exposed.find_nothing_else(case, mended)
    return tuple(replace(finding.verdict, device=one.device) for finding in (*kept, *without_gain))


def _host(one: Examined, case: Case) -> list[Finding]:
    """The host's causes. Late launches count only if they would be late without the calls that wait."""
    kept, before = list[Finding](), list[Change]()
    for finding in one.host:
        if finding.change is None:
            continue
        if (gained := _with_gain(one, case, finding, before)) is not None:
            kept.append(gained)
        before.append(finding.change)
    return kept


def _with_gain(one: Examined, case: Case, finding: Finding, before: Sequence[Change]) -> Finding | None:
    """The finding with its gain; None if it is small, by itself or after the changes `before`."""
    assert finding.change is not None
    least = LEAST_SHARE * case.window_us
    gain, _ = case.gain_of([finding.change])
    if gain < least:
        return None
    if before and case.gain_of([*before, finding.change])[0] - case.gain_of(before)[0] < least:
        return None
    verdict = replace(finding.verdict, gain_us=gain, gain_fraction=gain / case.window_us, device=one.device)
    return finding._replace(verdict=verdict)
