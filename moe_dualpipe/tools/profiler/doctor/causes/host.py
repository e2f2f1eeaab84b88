"""The host: calls that wait for the device, activities that keep it from launching, and launches that come too late.

After a call that waits for the device, nothing is queued, so the device idles until the host is ahead again. Without
the wait, the host would have stayed ahead. Launches that would be late even then are late because the host itself is
slow, or because it did something else: allocated memory, loaded data, saved a checkpoint, or was in the optimizer.
"""

from dataclasses import replace

import numpy as np

from .....messages import plural
from ...account import ALLOCATING, CHECKPOINT, LOADER, OPTIMIZER, host_spans
from ...intervals import EMPTY, Intervals, as_intervals, difference, intersection, length_before, union, union_length
from ...trace import Trace, innermost
from ..case import Case, Finding, most_costly
from ..dependencies import LATE
from ..replay import SYNC, Change, Floats, Graph, Mask, shorter, without
from ..view import AT_ONCE, COMM

SHORT = 10.0
"""Microseconds: about the time that one launch takes."""
ACTIVITIES = {ALLOCATING: "allocator", LOADER: "data-loader", CHECKPOINT: "checkpoint", OPTIMIZER: "slow-optimizer"}
"""The causes, by what the host did."""


def find(case: Case, trace: Trace) -> list[Finding]:
    """Find all causes of the host. Each may follow from those before it."""
    if case.view.is_cpu:
        return _waits_at_once(case)
    spans = {
        kind: union(as_intervals(row[:2] for row in rows)) - case.view.origin
        for kind, rows in host_spans(trace).items() if kind in ACTIVITIES
    }  # fmt: skip
    activities = [finding for kind in ACTIVITIES for finding in _activity(case, kind, spans[kind])]
    every = union(np.concatenate([EMPTY, *spans.values()]))
    waiting = union(np.concatenate([spans[ALLOCATING], spans[LOADER], spans[CHECKPOINT]]))
    return [*_syncs(case, trace, waiting), *activities, *_late_host(case, every), *_short_kernels(case)]


def _syncs(case: Case, trace: Trace, activities: Intervals) -> list[Finding]:
    """Calls in which the host waits for the device, outside of other activities."""
    view, waits = case.view, case.graph.edges
    unwanted = (waits.kind == SYNC) & ~_waits_in(case, activities)
    calls = case.call_of[waits.target[unwanted]]
    if not len(calls):
        return []
    awaited_end = view.call_ends[calls] - waits.lag[unwanted]
    first, known = np.full(len(view.calls) + 1, case.window_us), view.launch >= 0
    np.minimum.at(first, view.launch[known], view.start[known])
    following = np.maximum(np.minimum.accumulate(first[::-1])[::-1][calls + 1], awaited_end)
    costs = case.without_computation(awaited_end, following)
    around = innermost(trace.annotations, [(view.calls[call].start + view.origin, call) for call in calls.tolist()])
    names = [view.calls[call].name for call in calls.tolist()]
    places = [
        f"{name} in {around[call].name}" if call in around else name
        for call, name in zip(calls.tolist(), names, strict=True)
    ]
    waited = (view.call_ends - view.call_starts)[calls].sum()
    evidence = (
        f"{most_costly(names, costs)} and similar calls waited {len(calls):,} times, {waited:,.0f} us in total.",
        f"After {int((costs > LATE).sum()):,} of these waits, nothing was computed until the next launch took effect: "
        f"{costs.sum():,.0f} us in total, {costs.max():,.0f} us at most.",
    )
    change = without(np.flatnonzero(unwanted))
    return [case.finding("host-sync", calls, awaited_end, following, evidence, change, places=places)]


def _waits_in(case: Case, spans: Intervals) -> Mask:
    """The waits of calls that are partly inside `spans`."""
    inside = np.flatnonzero(_in_calls(case, spans) > 0)
    return (case.graph.edges.kind == SYNC) & np.isin(case.call_of[case.graph.edges.target], inside)


def _in_calls(case: Case, spans: Intervals) -> Floats:
    """How much of each call is inside `spans`."""
    before = length_before(spans)
    return (before(case.view.call_ends) - before(case.view.call_starts))[: len(case.view.calls)]


def _activity(case: Case, kind: str, spans: Intervals) -> list[Finding]:
    """An activity of the host during which the device had nothing to do."""
    lost = intersection(spans, case.idle)
    if not len(lost):
        return []
    evidence = (
        f"The host did this {plural(len(spans), 'time')}, for {union_length(spans):,.0f} us in total.",
        f"Meanwhile, the device had nothing to do for {union_length(lost):,.0f} us.",
    )
    following = np.minimum(np.searchsorted(case.view.start, lost[:, 1]), len(case.view.start) - 1)
    faster, waits = _host_without(case, spans), without(np.flatnonzero(_waits_in(case, spans)))
    start, end = lost.T
    return [case.finding(ACTIVITIES[kind], following, start, end, evidence, lambda graph: waits(faster(graph)))]


def _late_host(case: Case, activities: Intervals) -> list[Finding]:
    """Work that starts late because the host had not launched it."""
    view = case.view
    known = np.flatnonzero((view.launch >= 0) & (view.kind != COMM))
    if len(known) < 2:
        return []
    launched, free = view.call_ends[view.launch[known]], np.maximum(view.free[known], 0.0)
    waited = (view.start[known] - launched)[free < launched]
    launched += max(0.0, float(np.percentile(waited, 5))) if len(waited) else 0.0  # it cannot start sooner
    late = np.maximum(np.minimum(launched, view.start[known]) - free, 0.0)
    late[view.start[known] - launched > SHORT] = 0.0  # started long after the launch: it waited for something else
    costs = case.without_computation(free, free + late)
    cost = union_length(intersection(union(np.stack([free, free + late], axis=1)), case.gaps))
    bound = costs > LATE
    if not bound.any():
        return []
    evidence = (
        f"{bound.sum():,} of {len(known):,} kernels and copies were launched when their stream was already idle. "
        f"Nothing was computed for {cost:,.0f} us until they were launched.",
        f"A kernel starts {view.latency:,.1f} us or more after its launch.",
    )
    whole = np.array([[min(0.0, view.call_starts.min()) - 1.0, max(case.window_us, launched.max()) + 1.0]])
    change = _host_without(case, difference(whole, activities))
    return [case.finding("host-bound", known, free, free + late, evidence, change, costs=costs, cost_us=cost)]


def _host_without(case: Case, spans: Intervals) -> Change:
    """A change after which the host takes no time in `spans`, but for its waits."""
    nodes, before, inside = case.nodes.call, length_before(spans), _in_calls(case, spans)

    def change(graph: Graph) -> Graph:
        graph, lag = shorter(nodes, inside)(graph), graph.edges.lag.copy()
        start = graph.start[nodes]
        lag[nodes] -= before(start) - before(start - np.maximum(lag[nodes], 0.0))
        return replace(graph, edges=graph.edges._replace(lag=lag))

    return change


def _short_kernels(case: Case) -> list[Finding]:
    """Gaps between kernels that were queued."""
    view = case.view
    gaps = case.idle
    following = np.searchsorted(view.start, gaps[:, 1])
    queued = (view.launch[following] >= 0) & (view.call_ends[view.launch[following]] <= gaps[:, 0])
    queued &= gaps[:, 1] - gaps[:, 0] <= SHORT
    gaps, following = gaps[queued], following[queued]
    if not len(gaps) or np.median(view.duration[following]) >= SHORT:
        return []
    length = gaps[:, 1] - gaps[:, 0]
    evidence = (
        f"{len(gaps):,} gaps of {np.median(length):,.1f} us (median), between kernels of "
        f"{np.median(view.duration[following]):,.1f} us.",
    )
    return [case.finding("short-kernels", following, gaps[:, 0], gaps[:, 1], evidence, None)]


def _waits_at_once(case: Case) -> list[Finding]:
    """Segments of a CPU that wait for transfers that they have just started."""
    view, waits = case.view, case.graph.edges
    named = [i for i, call in enumerate(view.calls) if call.name == AT_ONCE]
    at_once = np.flatnonzero((waits.kind == SYNC) & np.isin(case.call_of[waits.target], named))
    calls = case.call_of[waits.target[at_once]]
    if not len(calls):
        return []
    start, end = view.call_starts[calls], view.call_ends[calls]
    costs = case.without_computation(start, end)
    evidence = (
        f"In {plural(len(calls), 'case')}, a segment waited for a transfer that it had just started: "
        f"{(end - start).sum():,.0f} us in total.",
        f"Nothing was computed for {costs.sum():,.0f} us of that, for {costs.max():,.0f} us at most in one wait.",
    )
    events = case.event_of[waits.source_node[at_once]]
    return [case.finding("host-sync/thread", events, start, end, evidence, without(at_once))]
