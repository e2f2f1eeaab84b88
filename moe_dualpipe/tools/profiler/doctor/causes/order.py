"""Work that could start, but starts only when unrelated work on another stream ends. Two causes:

few-queues    The two streams share a hardware queue, which starts work in the order of launch. The signs: no work on
              one stream ever started before work that was launched earlier on the other; and computation waits for
              transfers, too, or transfers wait for work that was not the last one launched before them.
late-launch   Otherwise. The transfer was put behind computation that it does not need, or launched after its data was
              ready.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ...intervals import length_before, union
from ..case import Case, Change, Finding, without_waits
from ..inputs import LATE, NEAR, same_chunk
from ..replay import ASSUMED, DATA, ORDER, Floats, Graph, Ints, Mask, order_of
from ..view import COMM, COMPUTE

LEAST = 3
"""Minimum number of occurrences of a pattern."""


def find(case: Case) -> list[Finding]:
    """Find transfers, and computation beside transfers, that wait for unrelated work."""
    waits, (source, target) = _misordered(case)
    shared = _share_queues(case, source, target)
    late, early = ~shared & case.is_comm[target], ~shared & ~case.is_comm[target]
    return [
        *_few_queues(case, target[shared], waits[shared]), *_late(case, target[late], waits[late]),
        *_early(case, source[early], target[early], waits[early]),
    ]  # fmt: skip


def _misordered(case: Case) -> tuple[Ints, tuple[Ints, Ints]]:
    """The ORDER dependencies with a transfer on one side or both, and the events on both sides."""
    waits, event_of = case.graph.waits, case.event_of
    found = np.flatnonzero(waits.kind == ORDER)
    source, target = event_of[waits.source[found]], event_of[waits.target[found]]
    chosen = case.is_comm[source] | case.is_comm[target]
    return found[chosen], (source[chosen], target[chosen])


def _delays(case: Case, events: Ints) -> Floats:
    """How long each event waited after it was launched, its stream was free, and its input was ready."""
    return case.view.start[events] - np.maximum(case.ready, case.inputs_ready(ASSUMED))[events]


def _share_queues(case: Case, source: Ints, target: Ints) -> Mask:
    """Whether the streams of each pair of events may share a hardware queue."""
    view = case.view
    if view.queues is not None and view.queues >= len(np.unique(view.stream)):
        return np.zeros(len(source), bool)
    pairs = np.sort(np.stack([view.stream[source], view.stream[target]], axis=1), axis=1)
    shared = np.zeros(len(source), bool)
    for one, other in {(int(a), int(b)) for a, b in pairs}:
        same = (pairs == (one, other)).all(axis=1)
        if _in_launch_order(case, one, other):
            shared |= same & (view.is_cpu or not _behind_all(case, source[same], target[same]))
    return shared


def _behind_all(case: Case, source: Ints, target: Ints) -> bool:
    """Whether only transfers wait, each for the last work launched before it, as if it had been put behind it."""
    view = case.view
    if case.is_comm[source].any():
        return False
    for stream in np.unique(view.stream[source]):
        of_stream = view.stream[source] == stream
        launches = np.sort(view.launch[view.stream == stream])
        after = np.searchsorted(launches, view.launch[source[of_stream]], side="right")
        if (after < np.searchsorted(launches, view.launch[target[of_stream]])).any():
            return False
    return True


def _in_launch_order(case: Case, one: int, other: int) -> bool:
    """Whether no event of one stream started before an event that had been launched earlier on the other stream."""
    view = case.view
    events = np.flatnonzero(np.isin(view.stream, (one, other)) & (view.launch >= 0))
    events = events[np.argsort(view.launch[events], kind="stable")]
    starts, is_one = view.start[events], view.stream[events] == one
    for mask in (is_one, ~is_one):
        latest = np.maximum.accumulate(np.where(mask, starts, -np.inf))
        if (starts[~mask] < latest[~mask] - LATE).any():
            return False
    return True


def _few_queues(case: Case, events: Ints, waits: Ints) -> list[Finding]:
    if len(events) < LEAST:
        return []
    view, delays = case.view, _delays(case, events)
    setting = "" if view.queues is None else f" CUDA_DEVICE_MAX_CONNECTIONS is {view.queues}."
    evidence = (
        f"{len(events):,} kernels were ready, but waited until unrelated work on another stream ended: "
        f"{delays.sum():,.0f} us in total.",
        f"They had been launched, their streams were free, and their input was ready. All work of these streams "
        f"started in the order in which it was launched.{setting}",
    )
    change, stays = without_waits(_chosen(case, waits)), _in_queues(case, waits)
    start, end = view.start[events] - delays, np.where(case.is_comm, view.end, view.start)[events]
    return [case.finding("few-queues", events, start, end, evidence, change, costs=delays, stays=stays)]


def _in_queues(case: Case, waits: Ints) -> Change:
    """A change after which the streams on both sides of these waits start work in the order of launch."""
    view, nodes, recorded = case.view, case.nodes.event, case.graph.waits
    pairs = np.stack([case.event_of[recorded.source[waits]], case.event_of[recorded.target[waits]]], axis=1)
    queues: list[set[int]] = []
    for streams in np.unique(view.stream[pairs], axis=0).tolist():
        shared = [queue for queue in queues if queue & {*streams}]
        queues = [queue for queue in queues if queue not in shared] + [set().union(streams, *shared)]

    def change(graph: Graph) -> Graph:
        before = np.full(len(graph.start), -1)
        for queue in queues:
            events = np.flatnonzero(np.isin(view.stream, [*queue]) & (view.launch >= 0))
            ordered = nodes[events[np.lexsort([view.launch[events], graph.launch[nodes[events]]])]]
            before[ordered[1:]] = ordered[:-1]
        changed = replace(graph, queue=before)
        return changed if order_of(changed) is not None else graph

    return change


def _late(case: Case, events: Ints, waits: Ints) -> list[Finding]:
    """Transfers that were put behind unrelated computation, or launched after their input was ready."""
    view = case.view
    launched, behind = _launched_late(case), _behind_later(case)
    late, inputs = np.concatenate([launched[0], behind[0]]), np.concatenate([launched[1], behind[1]])
    waited = np.concatenate([launched[2], behind[2]])
    every = np.concatenate([events, late])
    costs = np.concatenate([_delays(case, events), waited])
    if not len(every):
        return []
    drop = without_waits(_chosen(case, waits))
    source_of = _assumed_inputs(case)
    behind = [event for event in events.tolist() if event in source_of and view.launch[event] >= 0]
    moved = {event: source_of[event] for event in behind} | dict(zip(late.tolist(), inputs.tolist(), strict=True))
    earlier = _launched_with(case, moved)
    why = "Until then, work ran that was launched earlier and that they do not need."
    return [late_launch(case, every, costs, why, lambda graph: earlier(drop(graph)))]


def late_launch(case: Case, transfers: Ints, waited: Floats, why: str, change: Change) -> Finding:
    """The finding about transfers that started so many microseconds after their input was there."""
    worst, view = int(np.argmax(waited)), case.view
    evidence = (
        f"The input of {len(transfers):,} transfers was ready, but they started later: {waited.sum():,.0f} us in "
        f"total, {waited[worst]:,.0f} us at most ({case.place(transfers[worst])}).",
        f"{why}{case.launched_behind(transfers[worst])}",
    )
    start, end = view.start[transfers], view.end[transfers]
    return case.finding("late-launch", transfers, start - waited, end, evidence, change, costs=waited)


def _early(case: Case, source: Ints, target: Ints, waits: Ints) -> list[Finding]:
    """Computation that waits for transfers of the other chunk. Without the cause, their own chunk waits for them."""
    if not len(target):
        return []
    view, own_kind = case.view, case.view.kind == COMPUTE
    delays = _delays(case, target)
    own = [view.letters[transfer] for transfer in source.tolist()]
    needing = np.array([
        next((e for e in range(at, len(own_kind)) if own_kind[e] and view.letters[e] == letter), -1)
        for letter, at in zip(own, target.tolist(), strict=True)
    ])  # fmt: skip
    evidence = (
        f"{len(target):,} times, computation waited for a transfer of the other micro-batch: {delays.sum():,.0f} us in "
        f"total, {delays.max():,.0f} us at most.",
    )
    drop, nodes = without_waits(_chosen(case, waits)), case.nodes.event
    known = needing >= 0

    def change(graph: Graph) -> Graph:
        graph = drop(graph)
        awaited = nodes[source[known]].tolist(), nodes[needing[known]].tolist()
        return replace(graph, waits=graph.waits.add(*awaited, 0.0, DATA))

    start = view.start[target]
    return [case.finding("early-wait", target, start - delays, start, evidence, change, costs=delays)]


def _chosen(case: Case, waits: Ints) -> Mask:
    chosen = np.zeros(len(case.graph.waits.kind), bool)
    chosen[waits] = True
    return chosen


def _assumed_inputs(case: Case, *others: int) -> dict[int, int]:
    """The assumed input of each event. others: further kinds of inputs."""
    waits, event_of = case.graph.waits, case.event_of
    assumed = np.isin(waits.kind, (ASSUMED, *others))
    return dict(zip(event_of[waits.target[assumed]].tolist(), event_of[waits.source[assumed]].tolist(), strict=True))


def _launched_late(case: Case) -> tuple[Ints, Ints, Floats]:
    """Transfers that were launched after their input was ready, the events of these inputs, and how late they were.

    Only the chunk of the input is known. Two other causes are excluded: if nothing else was computed in between, the
    host as a whole is late; and the host may have waited for the device in between.
    """
    view = case.view
    waits = union(np.array([(call.start, call.end) for call in view.calls if call.sync]).reshape(-1, 2))
    waited = length_before(waits)
    call_starts = np.array([call.start for call in view.calls] or [0.0])
    found: dict[int, tuple[int, float]] = {}
    for event, source in _assumed_inputs(case).items():
        if view.kind[event] != COMM or view.letters[event] is None or view.launch[event] < 0:
            continue
        launched, before = call_starts[view.launch[event]], case.previous[event]
        since = max(float(view.end[source]), float(view.end[before]) if before >= 0 else 0.0)
        if (
            view.start[event] - launched > case.latency + LATE
            or launched < since + LATE
            or not same_chunk(view, event, source)
            or np.ptp(waited(np.array([since, launched]))) > 0.5 * (launched - since)
        ):
            continue
        idle = case.without_computation(np.array([since]), np.array([view.start[event]]))[0]
        if idle < 0.5 * (view.start[event] - since):
            found[event] = source, float(view.start[event] - since)
    return _columns(found)


def _behind_later(case: Case) -> tuple[Ints, Ints, Floats]:
    """Transfers that wait on their stream for an earlier transfer, whose input was launched after their own input.

    Returns these transfers, the events of their inputs, and how much later they start than if they had gone first.
    """
    view, source_of, all_of = case.view, _assumed_inputs(case), _assumed_inputs(case, DATA)
    found: dict[int, tuple[int, float]] = {}
    for event, source in source_of.items():
        before = int(case.previous[event])
        if view.kind[event] != COMM or view.letters[event] is None or before not in all_of:
            continue
        if view.launch[all_of[before]] <= view.launch[source] or view.start[event] > view.end[before] + NEAR:
            continue
        while before >= 0 and view.launch[before] > view.launch[source]:
            before = int(case.previous[before])
        since = max(float(view.end[source]), float(view.end[before]) if before >= 0 else 0.0)
        if view.start[event] > since + LATE:
            found[event] = source, float(view.start[event] - since)
    return _columns(found)


def _columns(found: Mapping[int, tuple[int, float]]) -> tuple[Ints, Ints, Floats]:
    events = np.array([*found], np.int64)
    sources = np.array([source for source, _ in found.values()], np.int64)
    return events, sources, np.array([us for _, us in found.values()])


def _launched_with(case: Case, moved: Mapping[int, int]) -> Change:
    """A change that launches events directly after their inputs, and moves them in their stream accordingly."""
    view, nodes = case.view, case.nodes.event
    before, launch = case.graph.before.copy(), case.graph.launch.copy()
    place = view.launch.astype(np.float64)
    for event, source in moved.items():
        launch[nodes[event]] = case.graph.launch[nodes[source]]
        place[event] = view.launch[source] + 0.5
    for stream in {int(view.stream[event]) for event in moved}:
        events = np.flatnonzero(view.stream == stream)
        if (view.launch[events] >= 0).all():
            ordered = events[np.argsort(place[events], kind="stable")]
            before[nodes[ordered[1:]]], before[nodes[ordered[0]]] = nodes[ordered[:-1]], -1

    def change(graph: Graph) -> Graph:
        changed = replace(
            graph, before=np.where(before != case.graph.before, before, graph.before),
            launch=np.where(launch != case.graph.launch, launch, graph.launch),
        )  # fmt: skip
        return changed if order_of(changed) is not None else graph

    return change
