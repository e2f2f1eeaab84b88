"""The order within a thread of a CPU: waits that come too early, and transfers that start too late.

The segments of a chunk, such as attn(F), compute, and its transfers start between them. If a segment waits for a
transfer that it started itself, nothing hides that transfer. If a segment that starts a transfer runs after computation
of the other chunk, the transfer starts late.
"""

from dataclasses import replace

import numpy as np

from .....messages import plural
from .....overlap.labels import WEIGHTS, letter_of
from ..case import Case, Finding, without_waits
from ..inputs import same_chunk
from ..replay import SYNC, Graph, Mask
from ..threads import AT_ONCE
from ..view import COMM
from .order import late_launch

SHORT = 500.0
"""Microseconds. Transfers that are late by less are ignored."""


def find(case: Case) -> list[Finding]:
    """Find segments that wait for their own transfers, and transfers that start after other computation."""
    return [*_early_waits(case), *_late_starts(case)]


def _early_waits(case: Case) -> list[Finding]:
    view, waits = case.view, case.graph.waits
    events, unwanted = _waits_at_once(case)
    if not events:
        return []
    call_of = {int(node): call for call, node in enumerate(case.nodes.call_end)}
    calls = [view.calls[call_of[node]] for node in waits.target[unwanted].tolist()]
    start, end = (np.array([getattr(call, edge) for call in calls]) for edge in ("start", "end"))
    costs = case.without_computation(start, end)
    evidence = (
        f"In {plural(len(calls), 'case')}, a segment waited for a transfer that it had just started: "
        f"{(end - start).sum():,.0f} us in total.",
        f"Nothing was computed for {costs.sum():,.0f} us of that, for {costs.max():,.0f} us at most in one wait.",
    )
    return [case.finding("host-sync/thread", events, start, end, evidence, without_waits(unwanted))]


def _waits_at_once(case: Case) -> tuple[list[int], Mask]:
    """The transfers for which their own segment waits, and which waits of the graph these are."""
    waits = case.graph.waits
    early = [i for i, call in enumerate(case.view.calls) if call.name == AT_ONCE]
    chosen = (waits.kind == SYNC) & np.isin(waits.target, case.nodes.call_end[early])
    event_of = {int(node): event for event, node in enumerate(case.nodes.event)}
    return [event_of[node] for node in waits.source[chosen].tolist()], chosen


def _late_starts(case: Case) -> list[Finding]:
    """Transfers that start after computation of the other chunk, although their input was ready."""
    view = case.view
    late: dict[int, tuple[int, float, float]] = {}
    early, _ = _waits_at_once(case)  # started elsewhere, they would be awaited as long
    for event in np.flatnonzero(case.is_comm & (view.launch >= 0)).tolist():
        if event in early:
            continue
        call, before = view.calls[view.launch[event]], int(case.previous[event])
        source, own_us = _input(case, event)
        if source < 0:
            continue
        since = max(float(view.end[source]) + own_us, float(view.end[before]) if before >= 0 else 0.0)
        waited = call.start - since
        if waited > SHORT and case.without_computation(np.array([since]), np.array([call.start]))[0] < 0.5 * waited:
            late[event] = source, own_us, waited
    if not late:
        return []
    events = np.array([*late], np.int64)
    sources, own, waited = (np.array(column) for column in zip(*late.values(), strict=True))
    nodes = case.nodes.event[events]

    def change(graph: Graph) -> Graph:
        launch, lag = graph.launch.copy(), graph.launch_lag.copy()
        launch[nodes] = case.nodes.event[sources]
        lag[nodes] = graph.duration[launch[nodes]] + own
        return replace(graph, launch=launch, launch_lag=lag)

    return [late_launch(case, events, waited, "Meanwhile, their thread computed what they do not need.", change)]


def _input(case: Case, event: int) -> tuple[int, float]:
    """The last computation of the chunk before the segment that started a transfer, or -1; and for how long this
    segment computed before it started the transfer."""
    view = case.view
    call, label = view.calls[view.launch[event]], view.labels[event]
    own_us = 0.0
    if view.letters[event] is None:
        return -1, own_us
    at = int(np.searchsorted(view.start, call.start))
    for source in range(at - 1, -1, -1):
        if view.kind[source] == COMM or view.events[source].stream != call.thread[1]:
            continue
        if view.labels[source] == label:
            own_us += float(view.duration[source])
        elif letter_of(view.labels[source]) not in (None, WEIGHTS) and same_chunk(view, event, source):
            return source, own_us
    return -1, own_us
