"""Transfers that take longer than others of the same size: because a rank joins late, or because the link is slow.

A collective ends on all ranks together, after the last one has joined. With the traces of several ranks, the shortest
duration is that of the last rank, and what others take longer is waiting (imbalance). Differences that remain are due
to the link (slow transfers). With the trace of one rank, the two cannot be told apart.
"""

from collections import defaultdict

import numpy as np

from ...collectives import bytes_of
from ..case import Case, Finding, most_costly, shorter, worst_of
from ..replay import Floats, Ints
from ..verdict import Verdict

LEAST = 4
"""Minimum number of transfers of one kind and size, to compare them."""
LONG = 1.5
"""A transfer is long if it takes this many times as long as the fastest quarter of its kind and size."""
OFTEN = 0.02
"""Waits below this share of the transfers' time are ordinary."""


def find(
    case: Case, rank_names: dict[int, str] | None = None, last: Ints | None = None, slowed_us: Floats | float = 0.0
) -> list[Finding]:  # fmt: skip
    """Find waits for other ranks and slow transfers.

    rank_names: names of the ranks by number. last: the number of the rank that joined each event last, or -1.
    slowed_us: how much longer each event took because of computation beside it.
    """
    joined, alone = case.comm_us is not None, case.own_us - slowed_us
    findings = []
    if joined and last is not None:
        findings += _imbalance(case, rank_names or {}, last)
    findings += _long(case, alone, joined)
    return findings


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


def _imbalance(case: Case, rank_names: dict[int, str], last: Ints) -> list[Finding]:
    duration, own = case.view.duration, case.own_us
    waited = np.where(case.is_comm, duration - own, 0.0)
    if waited.sum() < OFTEN * duration[case.is_comm].sum():
        return []
    weights = np.bincount(last[last >= 0], waited[last >= 0])
    late = int(np.argmax(weights))
    worst = worst_of(waited)
    name = rank_names.get(late, "another rank")
    evidence = (
        f"This rank waited {waited.sum():,.0f} us in {int((waited > 0).sum()):,} transfers until the last rank joined, "
        f"{waited[worst]:,.0f} us at most.",
        f"{weights[late] / weights.sum():.0%} of that was for {name}.",
    )
    verdict = Verdict(
        "imbalance", "Transfers wait for a slower rank.", evidence,
        f"Find out why {name} is late: more tokens, more work, a slower device, or a slower host.",
        most_costly([case.place(event) for event in range(len(waited))], waited),
        float(case.view.start[worst]), float(case.view.end[worst] - own[worst]), float(waited.sum()),
    )  # fmt: skip
    return [Finding(verdict, shorter(case.nodes.event, waited))]


def _long(case: Case, own: Floats, joined: bool) -> list[Finding]:
    usual = _usual(case, own)
    excess = np.where(case.is_comm, own - usual, 0.0)
    events = np.flatnonzero(excess > 0)
    if not len(events):
        return []
    worst = worst_of(excess)
    ratio = float(np.median(own[events] / usual[events]))
    evidence = (
        f"{len(events):,} of {int(case.is_comm.sum()):,} transfers take {ratio:.1f} times as long (median) as the "
        f"fastest quarter of the same kind and size: {excess.sum():,.0f} us more in total.",
        f"The longest takes {own[worst]:,.0f} us instead of {usual[worst]:,.0f}"
        f"{_bandwidth(case, worst, own, usual)}." + (" Waits for late ranks are not counted." if joined else ""),
    )  # fmt: skip
    place = most_costly([case.place(event) for event in events.tolist()], excess[events])
    costs = float(case.view.start[worst]), float(case.view.end[worst]), float(excess.sum())
    verdict = Verdict(
        "slow-transfer", "Some transfers are slower than others of the same size.", evidence,
        "Look for a slow link, or for other traffic on it at the same time.", place, *costs,
    ) if joined else Verdict(
        "imbalance", "Some transfers take much longer than others of the same size.", evidence,
        "Other ranks joined late, or the link was slow: analyze the traces of all ranks together to tell which.",
        place, *costs,
    )  # fmt: skip
    return [Finding(verdict, shorter(case.nodes.event, np.maximum(excess, 0.0)))]


def _bandwidth(case: Case, event: int, own: Floats, usual: Floats) -> str:
    size = bytes_of(case.view.events[event])
    if not size:
        return ""
    now, then = (size / us[event] / 1e3 for us in (own, usual))
    return f": {size / 1e6:,.1f} MB at {now:,.1f} instead of {then:,.1f} GB/s"
