"""Exposed copies and transfers: those of a pipeline, sums of gradients, weights, and others that have nothing to hide
behind."""

from collections import defaultdict

import numpy as np

from .....messages import plural
from ...account import copy_name
from ...categories import category_of_kernel
from ...communication import kind_of_collective
from ...intervals import Intervals, as_intervals, difference, intersection, length_before, union, union_length
from ..case import Case, Finding
from ..dependencies import CLOCK
from ..replay import DATA, Ints, Times, shorter, without
from ..view import COMM, COMPUTE, COPY

SOON = 30.0
"""Microseconds, at most, from the end of a transfer to the start of a computation that waited for it."""
_BUCKETS = 0.5
"""If a larger share of the sums of gradients is hidden, only the last of several buckets is exposed."""
_INTERLEAVED = 0.3
"""If a larger share of the communication is hidden, two micro-batches run beside each other."""


def is_point_to_point(case: Case, event: int) -> bool:
    """Whether a transfer is a send or a receive of a pipeline. The kernels' names do not say so."""
    return kind_of_collective(case.view.events[event]) in ("send", "recv")


def find(case: Case) -> list[Finding]:
    """Find exposed sends and receives of a pipeline, copies and fills."""
    return [*_pipeline(case), *_copies(case)]


def _pipeline(case: Case) -> list[Finding]:
    """Sends and receives for which computation waits."""
    view, waits = case.view, case.graph.edges
    events = np.array([i for i in np.flatnonzero(case.is_comm).tolist() if is_point_to_point(case, i)], np.int64)
    if not len(events):
        return []
    start, end = view.start[events], view.end[events]
    exposed = union_length(intersection(union(np.stack([start, end], axis=1)), case.gaps))
    evidence = (
        f"During {len(events):,} sends and receives, nothing was computed for {exposed:,.0f} us.",
        f"The longest wait is {case.without_computation(start, end).max():,.0f} us.",
    )
    from_them = np.isin(waits.source_node, case.nodes.event[events])
    change = without(np.flatnonzero((waits.kind == DATA) & from_them))
    return [case.finding("exposed-pipeline", events, start, end, evidence, change, cost_us=exposed)]


def _copies(case: Case) -> list[Finding]:
    """Copies and fills on the path of the computation."""
    view = case.view
    exposed = length_before(difference(np.array([[0.0, case.window_us]]), case.spans((COMPUTE,))))
    fills = np.array(["memset" in event.name.lower() for event in view.events], bool)
    found = []
    for key, wanted in (("copies", ~fills), ("memsets", fills)):
        events = np.flatnonzero((view.kind == COPY) & wanted)
        start, end = view.start[events], view.end[events]
        costs = exposed(end) - exposed(start)
        if not costs.any():
            continue
        size = sum(view.events[event].bytes for event in events.tolist())
        evidence = (f"Nothing was computed for {costs.sum():,.0f} us during {len(events):,} of them: {size:,} bytes.",)
        change = shorter(case.nodes.event[events], costs)
        names = [copy_name(view.events[event]) for event in events.tolist()]
        found.append(case.finding(key, events, start, end, evidence, change, costs=costs, places=names))
    return found


def find_nothing_else(case: Case, mended: Times, least_us: float) -> list[Finding]:
    """Transfers for which the next computation waits while nothing else is queued.

    mended: the times without all other causes. Transfers that are hidden then are not counted. least_us: the smallest
    cost.
    """
    alone, gaps = _alone(case)
    kinds = np.array([kind_of_collective(event) for event in case.view.events])
    by_key: dict[str, list[int]] = defaultdict(list)
    for event in alone.tolist():
        by_key[_key(case, event, str(kinds[event]))].append(event)
    found = []
    for key, chosen in by_key.items():
        events = np.array(chosen)
        start, end = case.view.start[events], case.view.end[events]
        waited = intersection(union(np.stack([start, end], axis=1)), gaps)
        cost = union_length(waited)
        if min(cost, _still_exposed(case, events, mended)) < least_us:
            continue
        inside = length_before(waited)
        costs = inside(end) - inside(start)
        worst = int(events[np.argmax(costs)])
        evidence = (
            f"The next computation starts as soon as {plural(len(events), 'transfer')} ended: {cost:,.0f} us.",
            f"The longest wait is for {case.place(worst)}.{case.launched_behind(worst)}",
            "No computation was queued that does not depend on these transfers.",
        )
        if key == "sum-at-end" and cost < _BUCKETS * case.view.duration[kinds == "all_reduce"].sum():
            key = "sum-at-end/last bucket"
        independent = key in ("sum-at-end", "exposed-weights")  # of the computation before or after them
        change = shorter(case.nodes.event[events], costs) if independent else None
        finding = case.finding(key, events, start, end, evidence, change, costs=costs, cost_us=cost)
        found.append(finding._replace(spans=waited))
    return found


def _key(case: Case, event: int, kind: str) -> str:
    """The cause of an exposed transfer, which depends on what it is for."""
    view = case.view
    computing = np.flatnonzero(view.kind == COMPUTE)
    after = int(np.searchsorted(view.start[computing], view.end[event] - CLOCK))
    if kind == "all_reduce" and (
        after == len(computing) or category_of_kernel(view.events[computing[after]].name) == "optimizer"
    ):
        return "sum-at-end"
    if kind in ("all_gather", "reduce_scatter"):
        return "exposed-weights"
    experts = kind == "all_to_all" or view.letters[event] is not None
    hidden = union_length(intersection(case.transferring, case.computing))
    interleaved = {"F", "B"} <= {*view.letters} and hidden > _INTERLEAVED * union_length(case.transferring)
    return "nothing-to-overlap" + ("" if not experts else "/interleaved" if interleaved else "/experts")


def _still_exposed(case: Case, transfers: Ints, mended: Times) -> float:
    start, end = mended.start[case.nodes.event], mended.end[case.nodes.event]
    computing = union(np.stack([start, end], axis=1)[~case.is_comm])
    chosen = union(np.stack([start[transfers], end[transfers]], axis=1))
    return union_length(chosen) - union_length(intersection(chosen, computing))


def _alone(case: Case) -> tuple[Ints, Intervals]:
    """Gaps that last until a transfer ends and a queued computation starts, or to the end, and the transfers in them.

    On a CPU, nothing is queued, but waits are known, and a thread takes time to go on.
    """
    view = case.view
    computing = np.flatnonzero(view.kind != COMM)
    transfers = np.array([i for i in np.flatnonzero(case.is_comm).tolist() if not is_point_to_point(case, i)], np.int64)
    starts, ends = view.start[computing], np.sort(view.end[transfers])
    waits = [(call.start, call.end) for call in view.calls if call.sync and view.is_cpu]
    found, waited = [], length_before(union(as_intervals(waits)))
    for start, end in case.gaps.tolist():
        last = int(np.searchsorted(ends, end + 1.0, side="right")) - 1
        after = int(np.searchsorted(starts, end))
        soon = end - start if np.ptp(waited(np.array([start, end]))) > 0.5 * (end - start) else SOON
        if last < 0 or not max(start, end - soon) <= ends[last]:
            continue
        launch = view.launch[computing[after]] if after < len(computing) else -1
        if launch < 0 or view.calls[launch].start < ends[last]:
            found.append((start, end))
    gaps = as_intervals(found)
    inside = length_before(gaps)
    return transfers[inside(view.end[transfers]) > inside(view.start[transfers])], gaps
