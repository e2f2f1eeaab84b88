"""Work that could start, and starts when unrelated work on another stream ends: hardware queues, or the launch order.

few-queues    the host had queued no wait, or the work belongs to the other chunk: streams that share a hardware
              queue run in the order of launches
late-launch   other transfers do start in the middle of computation, so there are queues enough: this transfer was
              launched behind computation that it does not need, or after its data was there
"""

from dataclasses import replace

import numpy as np

from ..case import Case, Change, Finding, most_costly, without_waits, worst_of
from ..inputs import LATE, same_chunk
from ..replay import ASSUMED, ORDER, Floats, Graph, Ints, Mask
from ..verdict import Verdict
from ..view import COMM

LEAST = 3
"""A pattern needs so many occurrences."""
INSIDE = 0.2
"""Share of the transfers that start in the middle of a computation; with more, there are queues enough."""


def find(case: Case) -> list[Finding]:
    """Find transfers, and computation beside transfers, that wait for unrelated work."""
    events, unwanted, delays = _misordered(case)
    if not len(events):
        return _late(case, events, unwanted, delays)
    never = ~case.view.may_wait[events]
    queues = case.view.queues
    many = queues is not None and queues > 1
    enough = not case.view.is_cpu and delays[never].sum() < 0.25 * delays.sum() and _starts_inside(case) > INSIDE
    if many or enough:
        return _late(case, events, unwanted, delays)
    return [*_few_queues(case, events, unwanted, delays), *_late(case, events[:0], unwanted & False, delays[:0])]


def _misordered(case: Case) -> tuple[Ints, Mask, Floats]:
    """The events with ORDER dependencies of which one side is a transfer, these dependencies, and the delays."""
    view, waits = case.view, case.graph.waits
    event_of = np.full(len(case.graph.start), -1, np.int64)
    event_of[case.nodes.event] = np.arange(len(view.events))
    source, target = event_of[waits.source], event_of[waits.target]
    unwanted = (waits.kind == ORDER) & (case.is_comm[source] | case.is_comm[target])
    events = target[unwanted]
    return events, unwanted, view.start[events] - np.maximum(case.ready[events], _inputs(case)[events])


def _inputs(case: Case) -> Floats:
    """When the assumed input of each event was there; 0 if none is known."""
    waits = case.graph.waits
    assumed = waits.kind == ASSUMED
    ends = np.zeros(len(case.graph.start))
    graph = case.graph
    np.maximum.at(ends, waits.target[assumed], (graph.start + graph.duration)[waits.source[assumed]])
    return ends[case.nodes.event]


def _starts_inside(case: Case) -> float:
    """The share of transfers that start in the middle of a computation."""
    view = case.view
    computing = view.kind != COMM
    edges = np.sort(np.concatenate([view.start[computing], view.end[computing]]))
    starts = view.start[case.is_comm]
    if not len(starts) or not len(edges):
        return 0.0
    at = np.searchsorted(edges, starts)
    near = np.minimum(
        np.abs(edges[np.minimum(at, len(edges) - 1)] - starts), np.abs(edges[np.maximum(at - 1, 0)] - starts)
    )
    before = np.searchsorted(np.sort(view.start[computing]), starts) - np.searchsorted(
        np.sort(view.end[computing]), starts
    )
    return float(((near > LATE) & (before > 0)).mean())


def _few_queues(case: Case, events: Ints, unwanted: Mask, delays: Floats) -> list[Finding]:
    if len(events) < LEAST:
        return []
    view = case.view
    worst = worst_of(delays)
    start = float(view.start[events[worst]])
    queues = view.queues
    setting = "" if queues is None else f" CUDA_DEVICE_MAX_CONNECTIONS is {queues}."
    inside = f" {_starts_inside(case):.0%} of the transfers start in the middle of a computation."
    evidence = (
        f"{len(events):,} kernels could start and waited {delays.sum():,.0f} us in total, until unrelated work on "
        f"another stream ended.",
        f"They had been launched, their streams were free, and their input was there.{inside}{setting}",
    )
    verdict = Verdict(
        "few-queues", "Streams wait for each other without a dependency: they share a hardware queue.", evidence,
        "Unset CUDA_DEVICE_MAX_CONNECTIONS or raise it (the default is 8), or use fewer streams.",
        most_costly([case.place(event) for event in events.tolist()], delays),
        start - float(delays[worst]), start, float(delays.sum()),
    )  # fmt: skip
    return [Finding(verdict, without_waits(unwanted))]


def _late(case: Case, events: Ints, unwanted: Mask, delays: Floats) -> list[Finding]:
    """Transfers that were launched behind unrelated computation, or after their input was there."""
    view = case.view
    ordered = case.is_comm[events]
    late, inputs, waited = _launched_late(case)
    every = np.concatenate([events[ordered], late])
    costs = np.concatenate([delays[ordered], waited])
    if not len(every):
        return []
    worst = worst_of(costs)
    start = float(view.start[every[worst]])
    evidence = (
        f"{len(every):,} transfers started {costs.sum():,.0f} us in total after their input was there, at most "
        f"{costs[worst]:,.0f} us.",
        "Until then, computation ran that was launched before them, and that they do not need.",
    )
    verdict = Verdict(
        "late-launch", "Transfers are launched later than their data is there.", evidence,
        "Launch each transfer directly after the computation that produces its data.",
        most_costly([case.place(event) for event in every.tolist()], costs),
        start - float(costs[worst]), start, float(costs.sum()),
    )  # fmt: skip
    drop = without_waits(_of_targets(case, unwanted, every))
    earlier = _launched_with(case, late, inputs)
    return [Finding(verdict, lambda graph: earlier(drop(graph)))]


def _of_targets(case: Case, unwanted: Mask, events: Ints) -> Mask:
    return unwanted & np.isin(case.graph.waits.target, case.nodes.event[events])


def _launched_late(case: Case) -> tuple[Ints, Ints, Floats]:
    """Transfers whose launch came after their input was there, the events of these inputs, and how late they were.

    Their input is known only by chunks. Something else must have been computed in between: otherwise, the host as a
    whole is late, which is another cause.
    """
    view, waits = case.view, case.graph.waits
    event_of = np.full(len(case.graph.start), -1, np.int64)
    event_of[case.nodes.event] = np.arange(len(view.events))
    call_starts = np.array([call.start for call in view.calls] or [0.0])
    found: dict[int, tuple[int, float]] = {}
    for node, other in zip(waits.target[waits.kind == ASSUMED], waits.source[waits.kind == ASSUMED], strict=True):
        event, source = int(event_of[node]), int(event_of[other])
        if view.kind[event] != COMM or view.letters[event] is None or view.launch[event] < 0:
            continue
        launched, before = call_starts[view.launch[event]], case.previous[event]
        since = max(float(view.end[source]), float(view.end[before]) if before >= 0 else 0.0)
        if (
            view.start[event] - launched > case.latency + LATE
            or launched < since + LATE
            or not same_chunk(view, event, source)
        ):
            continue
        idle = case.without_computation(np.array([since]), np.array([view.start[event]]))[0]
        if idle < 0.5 * (view.start[event] - since):
            found[event] = source, float(view.start[event] - since)
    events = np.array([*found], np.int64)
    sources = np.array([source for source, _ in found.values()], np.int64)
    return events, sources, np.array([us for _, us in found.values()])


def _launched_with(case: Case, events: Ints, sources: Ints) -> Change:
    """Launch events directly after their inputs."""

    def change(graph: Graph) -> Graph:
        launch = graph.launch.copy()
        launch[case.nodes.event[events]] = graph.launch[case.nodes.event[sources]]
        return replace(graph, launch=launch)

    return change
