"""Transfers and kernels that take longer than others alike, and small transfers that take as long as their latency.

A collective ends on all ranks together, after the last one has joined. With the traces of several ranks, the shortest
duration is that of the last rank, and what others take longer is waiting (imbalance). Differences that remain are due
to the link (slow transfers). With the trace of one rank, the two cannot be told apart.
"""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .....messages import plural
from ...categories import COPY_ENGINE, category_of
from ...intervals import length_before, union
from ..case import Case, Finding
from ..ranks import Joined
from ..replay import Floats, Graph, Times, shorter
from ..view import COMPUTE

LEAST = 4
"""Minimum number of transfers of one kind and size, to compare them."""
LONG = 1.5
"""A transfer is long if it takes this many times as long as the fastest quarter of its kind and size."""
OFTEN = 0.02
"""Waits below this share of the transfers' time are ordinary."""
MOVES = 0.75
"""If no rank is waited for during this share of the waits, the late rank changes."""
SOON = 50.0
"""Microseconds between small transfers, at most, that could be one."""
LEAST_RATE = 5e3
"""Elements per microsecond of a link, at least: what small transfers would take together."""
SHORTEST = 10.0
"""Microseconds. The duration of shorter events is not exact enough to compare it."""
SPREAD, SPREAD_JOINED = 0.3, 0.1
"""Minimum difference between the shares of a kernel's events that run beside the other kind; and of transfers whose
waits for other ranks are known and left out."""
SLOWER = 1.1
"""Smaller ratios are ordinary variation."""
CERTAIN = 5.0
"""The slowdown must be at least this many times its standard error."""
SMALL_ELEMENTS, SMALL_US = 1 << 17, 100.0
"""A transfer is small if it has at most so many elements, as far as known, and takes at most so long."""


def find(case: Case, rank_names: dict[int, str], met: Joined | None, slowed_us: Floats) -> list[Finding]:
    """Find waits for other ranks, slow transfers, and small ones.

    rank_names: names of the ranks by number. met: who joined last.
    slowed_us: how much longer each event took because of computation beside it.
    """
    waits = _imbalance(case, rank_names, met) if met is not None else []
    return [*waits, *_long(case, case.own_us - slowed_us, met is not None), *_small(case)]


def kind_key(case: Case, event: int) -> tuple[object, ...]:
    """Transfers with the same key should take equally long."""
    found = case.view.events[event]
    c = found.collective
    if c is None or c.in_elems is None:
        return found.name, found.blocks, found.bytes, case.view.labels[event]
    return found.name, c.name, c.group, c.ranks, c.in_elems, c.out_elems, c.dtype, c.peer


def _usual(case: Case, own: Floats) -> Floats:
    """How long each transfer takes; for long ones, how long the fastest quarter of its kind takes."""
    keys: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for event in np.flatnonzero(case.is_comm).tolist():
        keys[kind_key(case, event)].append(event)
    usual = own.copy()
    for events in keys.values():
        if len(events) >= LEAST:
            base = float(np.percentile(own[events], 25))
            chosen = np.array(events)
            usual[chosen] = np.where(own[chosen] > LONG * base, base, own[chosen])
    return usual


def _imbalance(case: Case, rank_names: dict[int, str], met: Joined) -> list[Finding]:
    waited = case.waited_us
    if waited.sum() < OFTEN * case.view.duration[case.is_comm].sum():
        return []
    own_waits, every_wait = (
        np.bincount(met.last[met.last >= 0], us[met.last >= 0]) for us in (waited, met.waited_us)
    )  # fmt: skip
    named = [
        f"{own_waits[rank] / own_waits.sum():.0%} of that was for {rank_names.get(rank, 'another rank')}"
        for rank in np.argsort(-own_waits).tolist() if own_waits[rank] > 0
    ]  # fmt: skip
    evidence = (
        f"This rank waited {waited.sum():,.0f} us in {int((waited > 0).sum()):,} transfers until the last rank joined, "
        f"{waited.max():,.0f} us at most.",
        f"{', '.join(named[:3])}.",
    )
    events, end = np.arange(len(waited)), case.view.end
    key = "imbalance" if every_wait.max() >= MOVES * every_wait.sum() else "imbalance/moving"
    change = shorter(case.nodes.event, waited)
    return [case.finding(key, events, end - waited, end, evidence, change, costs=waited)]


def _long(case: Case, own: Floats, joined: bool) -> list[Finding]:
    usual = _usual(case, own)
    excess = np.where(case.is_comm, own - usual, 0.0)
    events = np.flatnonzero(excess > 0)
    if not len(events):
        return []
    worst = int(np.argmax(excess))
    ratio = float(np.median(own[events] / usual[events]))
    evidence = (
        f"{len(events):,} of {int(case.is_comm.sum()):,} transfers take {ratio:.1f} times as long (median) as the "
        f"fastest quarter of the same kind and size: {excess.sum():,.0f} us more in total.",
        f"The longest takes {own[worst]:,.0f} us instead of {usual[worst]:,.0f}."
        + (" Waits for late ranks are not counted." if joined else ""),
    )  # fmt: skip
    end = case.view.end[events]
    change = shorter(case.nodes.event, np.maximum(excess, 0.0))
    key = "slow-transfer" if joined else "imbalance/one rank"
    return [case.finding(key, events, end - excess[events], end, evidence, change, costs=excess[events])]


def _small(case: Case) -> list[Finding]:
    """Runs of small transfers of one kind, which would take as long together as one of them."""

    def elements(event: int) -> int:
        found = case.view.events[event].collective
        return max(found.in_elems or 0, found.out_elems or 0) if found else 0

    def small(event: int) -> bool:
        return case.own_us[event] <= SMALL_US and elements(event) <= SMALL_ELEMENTS

    def place(event: int) -> tuple[object, ...]:
        found = case.view.events[event].collective
        kind = (found.name, found.group) if found else (case.view.events[event].name,)
        return int(case.view.stream[event]), *kind, small(event)

    every = sorted(np.flatnonzero(case.is_comm).tolist(), key=lambda event: (case.view.stream[event], event))
    pairs = [(a, b) for a, b in pairwise(every) if place(a) == place(b) and small(b)]
    further = np.array([b for a, b in pairs if case.view.start[b] - case.view.end[a] <= SOON], np.int64)
    if not len(further):
        return []
    own, start, end = case.own_us[further], case.view.start[further], case.view.end[further]
    moving = np.array([elements(event) for event in further]) / LEAST_RATE
    evidence = (
        f"{len(further):,} transfers follow another small one of the same kind. Each takes {np.median(own):,.1f} us "
        f"(median), {own.sum():,.0f} us in total.",
    )
    launches = case.view.launch[further]
    calls, nodes = case.nodes.call[launches[launches >= 0]], case.nodes.event[further]
    either = np.concatenate([nodes, calls])

    def change(graph: Graph) -> Graph:
        """Without the later calls, and what the host did for them."""
        lag, duration = graph.edges.lag.copy(), graph.duration.copy()
        lag[either] = np.minimum(lag[either], 0.0)
        duration[nodes], duration[calls] = np.minimum(moving, duration[nodes]), 0.0
        return replace(graph, edges=graph.edges._replace(lag=lag), duration=duration)

    return [case.finding("small-messages", further, start, end, evidence, change)]


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
    def kind(self) -> str:
        return "starved-transfer" if self.is_comm else "starved-computation"

    @property
    def excess_us(self) -> Floats:
        """How much longer each event took than alone."""
        return self.k * self.beside_us


def beside_us(case: Case, is_comm: bool, times: Times, moving_us: Floats) -> Floats:
    """For how long each event of one kind runs beside the other kind; 0 for others.

    moving_us: how long each event runs without its wait for other ranks, which comes first.
    """
    start, end = times.start[case.nodes.event], times.end[case.nodes.event]
    others = case.is_comm != is_comm
    before = length_before(union(np.stack([start, end], axis=1)[others]))
    return np.where(others, 0.0, before(end) - before(end - moving_us))


def slowdown_of(case: Case, is_comm: bool, beside_us: Floats) -> Slowdown | None:
    """How much slower events of one kind are beside the other kind; None if the difference is small or uncertain.

    The mean of all kernels whose events have different shares, weighted by certainty. beside_us: for how long each
    event ran beside the other kind.
    """
    keys: dict[tuple[object, ...], list[int]] = defaultdict(list)
    chosen = (case.is_comm if is_comm else case.view.kind == COMPUTE) & (case.own_us >= SHORTEST)
    for event in np.flatnonzero(chosen).tolist():
        found = case.view.events[event]
        keys[kind_key(case, event) if is_comm else (found.name, found.blocks, case.view.labels[event])].append(event)
    least = SPREAD_JOINED if is_comm and case.comm_us is not None else SPREAD
    every = (_fit(beside_us[events] / case.own_us[events], 1 / case.own_us[events], least) for events in keys.values())
    fits = [fit for fit in every if fit is not None]
    if not fits or case.view.is_cpu:  # transfers of CPUs use no SMs
        return None
    k, error, counts = (np.array(column) for column in zip(*fits, strict=True))
    weight = error**-2.0
    pooled = float((k * weight).sum() / weight.sum())
    spread = float(np.sqrt((weight * (k - pooled) ** 2).sum() / weight.sum() / len(k)))
    error_of_all = max(float(weight.sum() ** -0.5), spread)
    if not max(CERTAIN * error_of_all, 1 - 1 / SLOWER) <= pooled < 0.95:
        return None
    return Slowdown(is_comm, pooled, int(counts.sum()), len(fits), beside_us)


def _fit(share: Floats, speed: Floats, least: float) -> tuple[float, float, int] | None:
    """Fit a line to the speeds of one kernel: its k, the error of k, and the number of events. None: too few events.

    Events that are much slower than most are slow for another reason, such as a slow link. They are left out.
    """
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


def of_slowdown(case: Case, slowdown: Slowdown) -> Finding:
    """Transfers that are slower beside computation, or computation that is slower beside transfers."""
    excess = slowdown.excess_us
    what, beside = ("transfers", "computation") if slowdown.is_comm else ("kernels", "communication")
    evidence = (
        f"{what.capitalize()} take {1 / (1 - slowdown.k):.2f} times as long beside {beside} as alone, as measured on "
        f"{slowdown.events:,} {what} of {plural(slowdown.keys, 'kind')} that ran both ways.",
        f"In total, this adds {excess.sum():,.0f} us to the {what} beside {beside}.",
    )
    events, end = np.arange(len(excess)), case.view.end
    change = shorter(case.nodes.event, excess)
    copied = [category_of(event, "comm") == COPY_ENGINE for event in case.view.events]
    # By time: a backend that copies also has kernels, which pack messages.
    by_copies = 2 * case.own_us[case.is_comm & copied].sum() > case.own_us[case.is_comm].sum()
    key = slowdown.kind + "/copy engines" * bool(by_copies)
    return case.finding(key, events, end - excess, end, evidence, change, costs=excess)
