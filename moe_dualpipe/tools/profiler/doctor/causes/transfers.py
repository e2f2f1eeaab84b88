"""Transfers that take longer than others of the same size, and small ones that take as long as their latency.

A collective ends on all ranks together, after the last one has joined. With the traces of several ranks, the shortest
duration is that of the last rank, and what others take longer is waiting (imbalance). Differences that remain are due
to the link (slow transfers). With the trace of one rank, the two cannot be told apart.
"""

from collections import defaultdict
from dataclasses import replace
from itertools import groupby, pairwise

import numpy as np

from ...collectives import bytes_of
from ..case import Case, Finding
from ..ranks import Joined
from ..replay import Floats, Graph, shorter

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
LEAST_RATE = 1e4
"""Bytes per microsecond of a link, at least: what small transfers would take together."""
SMALL_BYTES, SMALL_US = 1 << 18, 100.0
"""A transfer is small if it has at most so many bytes; if these are unknown, if it takes less than so long."""


def find(
    case: Case, rank_names: dict[int, str] | None = None, met: Joined | None = None, slowed_us: Floats | float = 0.0
) -> list[Finding]:  # fmt: skip
    """Find waits for other ranks, slow transfers, and small ones.

    rank_names: names of the ranks by number. met: who joined last.
    slowed_us: how much longer each event took because of computation beside it.
    """
    joined, alone = case.comm_us is not None, case.own_us - slowed_us
    waits = _imbalance(case, rank_names or {}, met) if met is not None else []
    return [*waits, *_long(case, alone, joined), *_small(case)]


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
    duration, own = case.view.duration, case.own_us
    waited = np.where(case.is_comm, duration - own, 0.0)
    if waited.sum() < OFTEN * duration[case.is_comm].sum():
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
        f"The longest takes {own[worst]:,.0f} us instead of {usual[worst]:,.0f}"
        f"{_bandwidth(case, worst, own, usual)}." + (" Waits for late ranks are not counted." if joined else ""),
    )  # fmt: skip
    end = case.view.end[events]
    change = shorter(case.nodes.event, np.maximum(excess, 0.0))
    key = "slow-transfer" if joined else "imbalance/one rank"
    return [case.finding(key, events, end - excess[events], end, evidence, change, costs=excess[events])]


def _bandwidth(case: Case, event: int, own: Floats, usual: Floats) -> str:
    size = bytes_of(case.view.events[event])
    if not size:
        return ""
    now, then = (size / us[event] / 1e3 for us in (own, usual))
    return f": {size / 1e6:,.1f} MB at {now:,.1f} instead of {then:,.1f} GB/s"


def _small(case: Case) -> list[Finding]:
    """Runs of small transfers of one kind, which would take as long together as one of them."""

    def small(event: int) -> bool:
        size = bytes_of(case.view.events[event])
        return case.own_us[event] <= SMALL_US and (size is None or size <= SMALL_BYTES)

    def place(event: int) -> tuple[object, ...]:
        found = case.view.events[event].collective
        kind = (found.name, found.group) if found else (case.view.events[event].name,)
        return int(case.view.stream[event]), *kind, small(event)

    every = sorted(np.flatnonzero(case.is_comm).tolist(), key=lambda event: (case.view.stream[event], event))
    runs = [[*run] for key, run in groupby(every, key=place) if key[-1]]
    pairs = [pair for run in runs for pair in pairwise(run)]
    further = np.array([b for a, b in pairs if case.view.start[b] - case.view.end[a] <= SOON], np.int64)
    if not len(further):
        return []
    own, start, end = case.own_us[further], case.view.start[further], case.view.end[further]
    moving = np.array([bytes_of(case.view.events[event]) or 0 for event in further]) / LEAST_RATE
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
