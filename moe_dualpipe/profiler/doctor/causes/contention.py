"""Computation and transfers that slow each other down while they share the device.

Of the events with one kernel, grid and place, those that ran beside the other kind are compared with those that ran
alone. The speed 1 / duration falls linearly with the share of its time that an event is not alone, so events that are
beside the other kind for a part of their time count as well.
"""

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from ....messages import plural
from ...intervals import length_before
from ..case import Case, Finding, most_costly, with_durations, worst_of
from ..replay import Floats, Mask
from ..verdict import Verdict
from ..view import COMPUTE
from .transfers import kind_key

LEAST = 4
SHORTEST = 10.0
"""Microseconds. The duration of shorter events is not exact enough."""
SPREAD = 0.3
"""The shares of a kernel's events must differ by so much."""
SPREAD_JOINED = 0.1
"""The same for transfers whose waits for other ranks are known and left out."""
SLOWER = 1.1
"""Smaller ratios are ordinary."""
CERTAIN = 5.0
"""The slowdown must be so many times its standard error."""


class Slowdown(NamedTuple):
    """k: beside the other kind, the speed is 1 - k of the speed alone."""

    k: float
    error: float
    events: int
    keys: int

    @property
    def ratio(self) -> float:
        return 1 / (1 - self.k)


def find(case: Case) -> list[Finding]:
    """Find transfers that are slower beside computation, and computation that is slower beside transfers."""
    if case.view.is_cpu:  # its transfers use no SMs
        return []
    view, duration = case.view, case.view.duration
    own = duration if case.comm_us is None else np.where(case.is_comm, np.minimum(duration, case.comm_us), duration)
    findings = []
    for is_comm in (True, False):
        chosen = (case.is_comm if is_comm else view.kind == COMPUTE) & (own >= SHORTEST)
        other = length_before(case.computing if is_comm else case.transferring)
        share = np.zeros(len(own))
        start = view.end - own
        share[chosen] = (other(view.end[chosen]) - other(start[chosen])) / own[chosen]
        slowdown = _slowdown(case, chosen, own, share, is_comm)
        if slowdown is not None and slowdown.ratio >= SLOWER:
            findings.append(_finding(case, slowdown, own, share, is_comm))
    return findings


def _slowdown(case: Case, chosen: Mask, own: Floats, share: Floats, is_comm: bool) -> Slowdown | None:
    """The slowdown from all kernels with events of different shares, weighted by certainty; None if it is uncertain."""
    keys: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for event in np.flatnonzero(chosen).tolist():
        found = case.view.events[event]
        keys[kind_key(case, event) if is_comm else (found.name, found.blocks, case.view.labels[event])].append(event)
    fits, least = [], SPREAD_JOINED if is_comm and case.comm_us is not None else SPREAD
    for events in keys.values():
        x, y = share[events], 1 / own[events]
        if len(events) >= LEAST and np.ptp(x) >= least:
            centred = x - x.mean()
            slope = float((centred * y).sum() / (centred**2).sum())
            alone = float(y.mean() - slope * x.mean())
            if alone <= 0:
                continue
            rest = y - alone - slope * x
            error = float(np.sqrt((rest**2).sum() / (len(events) - 2) / (centred**2).sum())) / alone
            fits.append((-slope / alone, max(error, 0.01), len(events)))
    if not fits:
        return None
    k, error, counts = (np.array(column) for column in zip(*fits, strict=True))
    weight = error**-2.0
    pooled = float((k * weight).sum() / weight.sum())
    spread = float(np.sqrt((weight * (k - pooled) ** 2).sum() / weight.sum() / len(k)))
    error_of_all = max(float(weight.sum() ** -0.5), spread)
    if not CERTAIN * error_of_all < pooled < 0.95:
        return None
    return Slowdown(pooled, error_of_all, int(counts.sum()), len(fits))


def _finding(case: Case, slowdown: Slowdown, own: Floats, share: Floats, is_comm: bool) -> Finding:
    excess = own * slowdown.k * share
    worst = worst_of(excess)
    what = "transfers" if is_comm else "kernels"
    beside = "computation" if is_comm else "communication"
    evidence = (
        f"{what.capitalize()} take {slowdown.ratio:.2f} times as long beside {beside} as alone, as measured on "
        f"{slowdown.events:,} {what} of {plural(slowdown.keys, 'kind')} that ran both ways.",
        f"In total, this adds {excess.sum():,.0f} us to the {what} beside {beside}.",
    )
    verdict = Verdict(
        "starved-transfer" if is_comm else "starved-computation",
        f"{what.capitalize()} are slower beside {beside} than alone.", evidence,
        "Give communication more SMs, or a higher stream priority." if is_comm else
        "Use fewer SMs for communication (NCCL_MAX_CTAS, or the number of SMs of DeepEP), or copy engines.",
        most_costly([case.place(event) for event in range(len(own))], excess),
        float(case.view.start[worst]), float(case.view.end[worst]), float(excess.sum()),
    )  # fmt: skip
    return Finding(verdict, with_durations(case.nodes.event, case.view.duration - excess))
