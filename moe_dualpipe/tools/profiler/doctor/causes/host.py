"""The host: calls that wait for the device, and launches that come too late.

After a call that waits for the device, nothing is queued, so the device idles until the host is ahead again. Without
the wait, the host would have stayed ahead. Launches that would be late even then are late because the host itself is
slow.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...intervals import intersection, union, union_length
from ...trace import HostEvent, Trace
from ..case import Case, Change, Finding, most_costly, without_waits, worst_of
from ..inputs import LATE
from ..replay import SYNC, Floats, Graph, Ints
from ..verdict import Verdict
from ..view import COMM, Call

SHORT = 10.0
"""Microseconds: about the time that one launch takes."""
_NESTED = 64  # operators around a call are searched among this many before it


def find_syncs(case: Case, trace: Trace) -> list[Finding]:
    """Calls in which the host waits for the device."""
    view, waits = case.view, case.graph.waits
    unwanted = waits.kind == SYNC
    node_of_call = {int(node): i for i, node in enumerate(case.nodes.call_end)}
    calls = [node_of_call[node] for node in waits.target[unwanted].tolist() if node in node_of_call]
    if not calls:
        return []
    awaited_end = np.array([view.calls[call].end for call in calls]) - waits.lag[unwanted]
    following = _caught_up(case, calls, awaited_end)
    costs = case.without_computation(awaited_end, following)
    names = _around([view.calls[call] for call in calls], trace.operators, trace.annotations, view.origin)
    worst = worst_of(costs)
    place = most_costly(names, costs)
    what = most_costly([view.calls[call].name for call in calls], costs)
    costly = int((costs > LATE).sum())
    waited = sum(view.calls[call].end - view.calls[call].start for call in calls)
    evidence = (
        f"{what} and similar calls waited {len(calls):,} times, {waited:,.0f} us in total.",
        f"After {costly:,} of these waits, nothing was computed until the host was ahead again: "
        f"{costs.sum():,.0f} us in total, {costs[worst]:,.0f} us at most.",
    )
    verdict = Verdict(
        "host-sync", "The host waits for the device, so the queue is empty afterwards.", evidence,
        "Leave the number on the device, read it later, or copy it into pinned memory without blocking.",
        place, float(awaited_end[worst]), float(following[worst]), float(costs.sum()),
    )  # fmt: skip
    return [Finding(verdict, without_waits(unwanted))]


def _caught_up(case: Case, calls: Sequence[int], awaited_end: Floats) -> Floats:
    """When the host was ahead of the device again after each call: at the start of the first event whose launch came
    before its predecessor on the stream had started. At the latest, at the next wait or the end of the window."""
    view = case.view
    ends = np.array([call.end for call in view.calls])
    known = (view.launch >= 0) & (case.previous >= 0)
    ahead = np.flatnonzero(known)[ends[view.launch[known]] <= view.start[case.previous[known]]]
    first = np.full(len(view.calls) + 1, case.window_us)
    np.minimum.at(first, view.launch[ahead], view.start[ahead])
    first = np.minimum.accumulate(first[::-1])[::-1]
    found = np.maximum(first[np.array(calls) + 1], awaited_end)
    order = np.argsort(awaited_end, kind="stable")
    found[order[:-1]] = np.minimum(found[order[:-1]], awaited_end[order[1:]])
    return found


def _around(
    calls: Sequence[Call], operators: Sequence[HostEvent], annotations: Sequence[HostEvent], origin: float
) -> list[str]:
    """The outermost operator around each call, and the innermost annotation around it."""
    found = []
    by_start = [sorted(events, key=lambda event: event.start) for events in (operators, annotations)]
    starts = [[event.start for event in events] for events in by_start]
    for call in calls:
        time, names = call.start + origin, []
        for events, times in zip(by_start, starts, strict=True):
            at = bisect_right(times, time)
            nested = [e for e in events[max(at - _NESTED, 0) : at] if e.end > time and e.thread == call.thread]
            names.append(nested[0 if events is by_start[0] else -1].name if nested else "")
        operator, annotation = names
        inner = operator or call.name
        found.append(f"{inner} in {annotation}" if annotation else inner)
    return found


def find_late_host(case: Case) -> list[Finding]:
    """Work that starts late because the host had not launched it."""
    view = case.view
    known = np.flatnonzero((view.launch >= 0) & (view.kind != COMM))
    if len(known) < 2:
        return []
    call_starts = np.array([call.start for call in view.calls])
    launched = np.array([call.end for call in view.calls])[view.launch[known]]
    free = np.where(case.previous[known] >= 0, view.end[case.previous[known]], 0.0)
    waited = (view.start[known] - launched)[free < launched]
    launched += max(0.0, float(np.percentile(waited, 5))) if len(waited) else 0.0  # it cannot start sooner
    late = np.maximum(np.minimum(launched, view.start[known]) - free, 0.0)
    late[view.start[known] - launched > SHORT] = 0.0  # started long after the launch: it waited for something else
    costs = case.without_computation(free, free + late)
    cost = union_length(intersection(union(np.stack([free, free + late], axis=1)), case.gaps))
    worst = worst_of(costs)
    bound = costs > LATE
    if not bound.any():
        return []
    short = view.duration[known] < SHORT
    between = np.diff(np.sort(call_starts[np.unique(view.launch[known])]))
    evidence = (
        f"{bound.sum():,} of {len(known):,} kernels and copies were launched when their stream was already idle. "
        f"Nothing was computed for {cost:,.0f} us until they were launched.",
        f"The host launches one of them every {np.median(between) if len(between) else 0:,.1f} us (median), and "
        f"{short.mean():.0%} of the kernels take less than {SHORT:.0f} us.",
        f"A kernel starts {case.latency:,.1f} us or more after its launch.",
    )
    verdict = Verdict(
        "host-bound", "The host launches work too late, and the device waits for it.", evidence,
        "Launch fewer and larger kernels: fused kernels, torch.compile, CUDA graphs, or larger micro-batches.",
        most_costly([case.place(event) for event in known.tolist()], costs),
        float(free[worst]), float(free[worst] + late[worst]), cost,
    )  # fmt: skip
    return [Finding(verdict, _at_once(case))]


def _at_once(case: Case) -> Change:
    """A change after which the host takes no time between waits."""
    nodes: Ints = case.nodes.call

    def change(graph: Graph) -> Graph:
        duration, lag = graph.duration.copy(), graph.before_lag.copy()
        duration[nodes] = 0.0
        has_before = nodes[graph.before[nodes] >= 0]
        lag[has_before] = np.minimum(lag[has_before], 0.0)
        return replace(graph, duration=duration, before_lag=lag)

    return change
