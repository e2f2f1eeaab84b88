"""Exposed transfers: those of a pipeline, and those that have no independent computation to hide behind."""

import re

import numpy as np

from ...intervals import Intervals, as_intervals, intersection, length_before, union, union_length
from ..case import Case, Finding, most_costly, without_waits, worst_of
from ..replay import DATA, Ints, Mask, Times
from ..verdict import Verdict
from ..view import COMM

LEAST = 3
NOTHING_ELSE = 0.05
"""Minimum share of the window that is exposed because there is nothing else to compute."""
SOON = 30.0
"""Microseconds, at most, from the end of a transfer to the start of a computation that waited for it."""
_POINT_TO_POINT = re.compile(r"(^|[:_ ])i?(send|recv)(\b|_|$)(?!.*all)", re.IGNORECASE)


def is_point_to_point(case: Case, event: int) -> bool:
    """Whether a transfer is a send or a receive of a pipeline. The kernels' names do not say so."""
    found = case.view.events[event]
    name = found.collective.name if found.collective is not None else f"{found.name} {case.view.labels[event]}"
    return "sendrecv" not in name.lower() and _POINT_TO_POINT.search(name) is not None


def find_pipeline(case: Case) -> list[Finding]:
    """Sends and receives for which computation waits."""
    view = case.view
    chosen = np.array([bool(c) and is_point_to_point(case, i) for i, c in enumerate(case.is_comm)], bool)
    if chosen.sum() < LEAST:
        return []
    spans = union(np.stack([view.start[chosen], view.end[chosen]], axis=1))
    exposed = union_length(intersection(spans, case.gaps))
    costs = case.without_computation(view.start, np.where(chosen, view.end, view.start))
    worst = worst_of(costs)
    evidence = (
        f"During {int(chosen.sum()):,} sends and receives, nothing was computed for {exposed:,.0f} us.",
        f"The longest wait is {costs[worst]:,.0f} us.",
    )
    verdict = Verdict(
        "exposed-pipeline", "Computation waits for sends and receives of the pipeline.", evidence,
        "Post receives one micro-batch ahead, do not wait for sends, or use more micro-batches.",
        most_costly([case.place(event) for event in range(len(costs))], costs),
        float(view.start[worst]), float(view.end[worst]), exposed,
    )  # fmt: skip
    return [Finding(verdict, without_waits(_inputs_from(case, chosen)))]


def _inputs_from(case: Case, chosen: Mask) -> Mask:
    waits = case.graph.waits
    return (waits.kind == DATA) & np.isin(waits.source, case.nodes.event[chosen])


def find_nothing_else(case: Case, mended: Times) -> list[Finding]:
    """Transfers for which the next computation waits while nothing else is queued.

    mended: the times without all other causes. Transfers that are hidden then are not counted.
    """
    alone, gaps = _alone(case)
    if case.view.is_cpu or len(alone) < LEAST:  # nothing is ever queued on a CPU
        return []
    cost, exposed = (union_length(intersection(case.transferring, where)) for where in (gaps, case.gaps))
    if min(cost, _still_exposed(case, alone, mended)) < NOTHING_ELSE * case.window_us:
        return []
    costs = case.without_computation(case.view.start[alone], case.view.end[alone])
    start, end = gaps[worst_of(gaps[:, 1] - gaps[:, 0])].tolist()
    evidence = (
        f"{len(alone):,} transfers delay the next computation, which starts as soon as they end: {cost:,.0f} of the "
        f"{exposed:,.0f} us of exposed communication.",
        "No computation was queued that does not depend on these transfers.",
    )
    verdict = Verdict(
        "nothing-to-overlap", "There is no independent computation to run beside the transfers.", evidence,
        "Interleave a second micro-batch (DualPipe, two-batch overlap), send less, or start the transfers in parts, "
        "each as soon as its input is ready.",
        most_costly([case.place(event) for event in alone.tolist()], costs), start, end, cost,
    )  # fmt: skip
    return [Finding(verdict, None)]


def _still_exposed(case: Case, transfers: Ints, mended: Times) -> float:
    start, end = mended.start[case.nodes.event], mended.end[case.nodes.event]
    computing = union(np.stack([start, end], axis=1)[~case.is_comm])
    chosen = union(np.stack([start[transfers], end[transfers]], axis=1))
    return union_length(chosen) - union_length(intersection(chosen, computing))


def _alone(case: Case) -> tuple[Ints, Intervals]:
    """Gaps that last until a transfer ends and a queued computation starts, and the transfers in them."""
    view = case.view
    computing = np.flatnonzero(view.kind != COMM)
    transfers = np.array([i for i in np.flatnonzero(case.is_comm).tolist() if not is_point_to_point(case, i)], np.int64)
    starts, ends = view.start[computing], np.sort(view.end[transfers])
    found = []
    for start, end in case.gaps.tolist():
        last = int(np.searchsorted(ends, end + 1.0, side="right")) - 1
        after = int(np.searchsorted(starts, end))
        if last < 0 or after == len(computing) or not max(start, end - SOON) <= ends[last]:
            continue
        launch = view.launch[computing[after]]
        if launch < 0 or view.calls[launch].start < ends[last]:
            found.append((start, end))
    gaps = as_intervals(found)
    inside = length_before(gaps)
    return transfers[inside(view.end[transfers]) > inside(view.start[transfers])], gaps
