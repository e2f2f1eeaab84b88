"""Computation and transfers that slow each other down while they share the device.

Of the events with one kernel, grid and place, those that ran beside the other kind are compared with those that ran
alone. The speed 1 / duration falls linearly with the share of its time that an event is not alone, so events that are
beside the other kind for a part of their time count as well.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...intervals import length_before, union
from ..case import Case, Finding, most_costly, shorter, worst_of
from ..replay import Floats, Graph, Times
from ..verdict import Verdict
from ..view import COMPUTE
from .transfers import LONG, kind_key

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
    """How much slower events of one kind are beside the other kind. k: their speed beside it is 1 - k of that alone."""

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


def slowdowns_of(case: Case) -> list[Slowdown]:
    """How much transfers and computation slow each other down, if that is certain."""
    if case.view.is_cpu:  # its transfers use no SMs
        return []
    recorded, own = case.graph.recorded, case.own_us
    found = [_slowdown(case, is_comm, _beside(case, is_comm, recorded, own)) for is_comm in (True, False)]
    return [slowdown for slowdown in found if slowdown is not None and slowdown.ratio >= SLOWER]


def find(case: Case, slowdowns: Sequence[Slowdown]) -> list[Finding]:
    """Find transfers that are slower beside computation, and computation that is slower beside transfers."""
    return [_finding(case, slowdown) for slowdown in slowdowns]


def slowed(case: Case, slowdowns: Sequence[Slowdown], changed: Graph, times: Times, moving_us: Floats) -> Graph:
    """The graph `changed` with the durations that its events have if they run at `times`.

    moving_us: how long each event runs then, without waits for other ranks.
    """
    duration = changed.duration.copy()
    for slowdown in slowdowns:
        beside = _beside(case, slowdown.is_comm, times, moving_us)
        duration[case.nodes.event] += slowdown.k * (beside - slowdown.beside_us)
    return replace(changed, duration=np.maximum(duration, 0.0))


def _beside(case: Case, is_comm: bool, times: Times, moving_us: Floats) -> Floats:
    """For how long each event of one kind runs beside the other kind. Transfers move data at their end."""
    start, end = times.start[case.nodes.event], times.end[case.nodes.event]
    others = case.is_comm != is_comm
    before = length_before(union(np.stack([start, end], axis=1)[others]))
    return np.where(others, 0.0, before(end) - before(end - moving_us))


def _slowdown(case: Case, is_comm: bool, beside_us: Floats) -> Slowdown | None:
    """The slowdown from all kernels with events of different shares, weighted by certainty; None if it is uncertain."""
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

    Events that are much slower than the line are slow for another reason, such as a slow link. They are left out.
    """
    while len(share) >= LEAST and np.ptp(share) >= least:
        centred = share - share.mean()
        slope = float((centred * speed).sum() / (centred**2).sum())
        alone = float(speed.mean() - slope * share.mean())
        line = alone + slope * share
        usual = LONG * speed > line
        if not usual.all():
            share, speed = share[usual], speed[usual]
            continue
        if alone <= 0:
            return None
        error = float(np.sqrt(((speed - line) ** 2).sum() / (len(share) - 2) / (centred**2).sum())) / alone
        return -slope / alone, max(error, 0.01), len(share)
    return None


def _finding(case: Case, slowdown: Slowdown) -> Finding:
    is_comm, excess = slowdown.is_comm, slowdown.excess_us
    worst = worst_of(excess)
    what = plural_of = "transfers" if is_comm else "kernels"
    beside = "computation" if is_comm else "communication"
    evidence = (
        f"{what.capitalize()} take {slowdown.ratio:.2f} times as long beside {beside} as alone, by "
        f"{slowdown.events:,} {plural_of} of {slowdown.keys} kinds that ran in both ways.",
        f"All {what} beside {beside}: {excess.sum():,.0f} us longer than alone, in total.",
    )
    verdict = Verdict(
        slowdown.kind,
        f"{what.capitalize()} are slower beside {beside} than alone.", evidence,
        "Give communication more SMs, or a higher stream priority." if is_comm else
        "Use fewer SMs for communication (NCCL_MAX_CTAS, or the number of SMs of DeepEP), or copy engines.",
        most_costly([case.place(event) for event in range(len(excess))], excess),
        float(case.view.start[worst]), float(case.view.end[worst]), float(excess.sum()),
    )  # fmt: skip
    return Finding(verdict, shorter(case.nodes.event, excess))
