"""Computation and transfers that slow each other down while they share the device.

Among events with the same kernel, grid and place, those that ran beside the other kind are compared with those that ran
alone. The speed, 1 / duration, falls linearly with the share of its time that an event runs beside the other kind.
So events that overlap only partly count as well.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .....messages import plural
from ...intervals import length_before, union
from ..case import Case, Finding
from ..replay import Floats, Times, shorter
from ..view import COMPUTE
from .transfers import LONG, kind_key

LEAST = 4
SHORTEST = 10.0
"""Microseconds. The duration of shorter events is not exact enough."""
SPREAD = 0.3
"""Minimum difference between the shares of a kernel's events."""
SPREAD_JOINED = 0.1
"""The same for transfers whose waits for other ranks are known and left out."""
SLOWER = 1.1
"""Smaller ratios are ordinary variation."""
CERTAIN = 5.0
"""The slowdown must be at least this many times its standard error."""


class Slowdown(NamedTuple):
    """How much slower events of one kind are beside the other kind. Their speed there is 1 - k of their speed alone."""

    is_comm: bool
    """Whether transfers are slowed down, or computation."""
    k: float
    events: int
    keys: int
    beside_us: Floats
    """For how long each event ran beside the other kind; 0 for events of the other kind."""

    @property
    def ratio(self) -> float:
        return 1 / (1 - self.k)

    @property
    def kind(self) -> str:
        return "starved-transfer" if self.is_comm else "starved-computation"

    @property
    def excess_us(self) -> Floats:
        """How much longer each event took than alone."""
        return self.k * self.beside_us


def slowdown_of(case: Case, is_comm: bool, beside_us: Floats) -> Slowdown | None:
    """How much slower events of one kind are beside the other kind; None if the difference is small or uncertain.

    beside_us: for how long each event ran beside the other kind.
    """
    found = None if case.view.is_cpu else _slowdown(case, is_comm, beside_us)  # transfers of CPUs use no SMs
    return found if found is not None and found.ratio >= SLOWER else None


def find(case: Case, slowdowns: Sequence[Slowdown]) -> list[Finding]:
    """Find transfers that are slower beside computation, and computation that is slower beside transfers."""
    return [_finding(case, slowdown) for slowdown in slowdowns]


def beside_us(case: Case, is_comm: bool, times: Times, moving_us: Floats) -> Floats:
    """For how long each event of one kind runs beside the other kind; 0 for others.

    moving_us: how long each event runs without its wait for other ranks, which comes first.
    """
    start, end = times.start[case.nodes.event], times.end[case.nodes.event]
    others = case.is_comm != is_comm
    before = length_before(union(np.stack([start, end], axis=1)[others]))
    return np.where(others, 0.0, before(end) - before(end - moving_us))


def _slowdown(case: Case, is_comm: bool, beside_us: Floats) -> Slowdown | None:
    """The mean slowdown of all kernels whose events have different shares, weighted by certainty; None if uncertain."""
    keys: dict[tuple[object, ...], list[int]] = defaultdict(list)
    chosen = (case.is_comm if is_comm else case.view.kind == COMPUTE) & (case.own_us >= SHORTEST)
    for event in np.flatnonzero(chosen).tolist():
        found = case.view.events[event]
        keys[kind_key(case, event) if is_comm else (found.name, found.blocks, case.view.labels[event])].append(event)
    least = SPREAD_JOINED if is_comm and case.comm_us is not None else SPREAD
    every = (_fit(beside_us[events] / case.own_us[events], 1 / case.own_us[events], least) for events in keys.values())
    fits = [fit for fit in every if fit is not None]
    if not fits:
        return None
    k, error, counts = (np.array(column) for column in zip(*fits, strict=True))
    weight = error**-2.0
    pooled = float((k * weight).sum() / weight.sum())
    spread = float(np.sqrt((weight * (k - pooled) ** 2).sum() / weight.sum() / len(k)))
    error_of_all = max(float(weight.sum() ** -0.5), spread)
    if not CERTAIN * error_of_all < pooled < 0.95:
        return None
    return Slowdown(is_comm, pooled, int(counts.sum()), len(fits), beside_us)


def _fit(share: Floats, speed: Floats, least: float) -> tuple[float, float, int] | None:
    """Fit a line to the speeds of one kernel: its k, the error of k, and the number of events. None: too few events.

    Events that are much slower than most are slow for another reason, such as a slow link. They are left out.
    """
    if len(share) < LEAST or np.ptp(share) < least:
        return None
    usual = LONG * speed > np.median(speed)
    share, speed = share[usual], speed[usual]
    if len(share) < LEAST or np.ptp(share) < least:
        return None
    centered = share - share.mean()
    slope = float((centered * speed).sum() / (centered**2).sum())
    alone = float(speed.mean() - slope * share.mean())
    if alone <= 0:
        return None
    rest = speed - alone - slope * share
    error = float(np.sqrt((rest**2).sum() / (len(share) - 2) / (centered**2).sum())) / alone
    return -slope / alone, max(error, 0.01), len(share)


def _finding(case: Case, slowdown: Slowdown) -> Finding:
    excess = slowdown.excess_us
    what, beside = ("transfers", "computation") if slowdown.is_comm else ("kernels", "communication")
    evidence = (
        f"{what.capitalize()} take {slowdown.ratio:.2f} times as long beside {beside} as alone, as measured on "
        f"{slowdown.events:,} {what} of {plural(slowdown.keys, 'kind')} that ran both ways.",
        f"In total, this adds {excess.sum():,.0f} us to the {what} beside {beside}.",
    )
    events, end = np.arange(len(excess)), case.view.end
    change = shorter(case.nodes.event, excess)
    return case.finding(slowdown.kind, events, end - excess, end, evidence, change, costs=excess)
