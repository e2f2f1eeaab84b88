"""Exposed transfers: those of a pipeline, and those beside which there is nothing else to compute."""

import re

import numpy as np

from ...intervals import intersection, total, union
from ..case import Case, Finding, most_costly, without_waits, worst_of
from ..inputs import NEAR
from ..replay import DATA, Floats, Ints, Mask, Times
from ..verdict import Verdict
from ..view import COMM

LEAST = 3
NOTHING_ELSE = 0.05
"""Share of the window that must be exposed because there is nothing else to compute."""
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
    exposed = total(intersection(spans, case.gaps))
    costs = case.without_computation(view.start, np.where(chosen, view.end, view.start))
    worst = worst_of(costs)
    evidence = (
        f"{int(chosen.sum()):,} sends and receives, of which nothing was computed beside {exposed:,.0f} us.",
        f"The longest such wait is {costs[worst]:,.0f} us.",
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
    """Transfers that start when the computation before them ends, and whose result the next computation needs.

    mended: the times after all other causes are removed. What is hidden then is not counted.
    """
    view = case.view
    alone, next_start = _alone(case)
    if len(alone) < LEAST:
        return []
    costs = case.without_computation(view.start[alone], view.end[alone])
    cost = total(intersection(union(np.stack([view.start[alone], view.end[alone]], axis=1)), case.gaps))
    if min(cost, _still_exposed(case, alone, mended)) < NOTHING_ELSE * case.window_us:
        return []
    worst = worst_of(costs)
    exposed = total(intersection(case.transferring, case.gaps))
    evidence = (
        f"{len(alone):,} transfers start when the computation before them ends, and the next computation starts when "
        f"they end: {cost:,.0f} of {exposed:,.0f} us exposed.",
        "No other computation was queued that does not depend on them.",
    )
    verdict = Verdict(
        "nothing-to-overlap", "There is no independent computation to run beside the transfers.", evidence,
        "Interleave a second micro-batch (DualPipe, two-batch overlap), or split the transfer into chunks.",
        most_costly([case.place(event) for event in alone.tolist()], costs),
        float(view.start[alone[worst]]), float(next_start[worst]), cost,
    )  # fmt: skip
    return [Finding(verdict, None)]


def _still_exposed(case: Case, transfers: Ints, mended: Times) -> float:
    start, end = mended.start[case.nodes.event], mended.end[case.nodes.event]
    computing = union(np.stack([start, end], axis=1)[~case.is_comm])
    chosen = union(np.stack([start[transfers], end[transfers]], axis=1))
    return total(chosen) - total(intersection(chosen, computing))


def _alone(case: Case) -> tuple[Ints, Floats]:
    """Transfers directly between two computations, and the start of the second one."""
    view = case.view
    computing = np.flatnonzero(view.kind != COMM)
    starts, ends = view.start[computing], np.sort(view.end[computing])
    found, following = [], []
    for event in np.flatnonzero(case.is_comm).tolist():
        if is_point_to_point(case, event):
            continue
        after = int(np.searchsorted(starts, view.end[event] - 1.0))
        before = int(np.searchsorted(ends, view.start[event] + 1.0, side="right")) - 1
        running = np.searchsorted(starts, view.end[event] - 1.0) - np.searchsorted(
            ends, view.start[event] + 1.0, side="right"
        )
        if after < len(starts) and before >= 0 and running == 0:
            launch = view.launch[computing[after]]
            queued = launch < 0 or view.calls[launch].start < view.end[event]
            if starts[after] - view.end[event] <= NEAR and view.start[event] - ends[before] <= 2 * NEAR and queued:
                found.append(event)
                following.append(float(starts[after]))
    return np.array(found, np.int64), np.array(following)
