"""Work that could start, but starts only when unrelated work ends:

few-queues      The two streams share a hardware queue, which starts work in the order of launch. The signs: no work on
                one stream ever started before work that was launched earlier on the other; and computation waits for
                transfers, too.
late-launch     Otherwise. The transfer was put behind computation that it does not need, or behind another transfer
                whose input came later.
early-wait      Computation waits for a transfer of the other chunk.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..case import Case, Finding
from ..dependencies import LATE, NEAR
from ..replay import ASSUMED, DATA, ORDER, Change, Floats, Graph, Ints, Mask, edges, ends, merged, rewired, without
from ..view import COMPUTE

LEAST = 3
"""Minimum number of occurrences of a pattern."""


def find(case: Case) -> list[Finding]:
    """Find transfers, and computation beside transfers, that wait for unrelated work."""
    waits = np.flatnonzero(case.graph.edges.kind == ORDER)
    source, target = (case.event_of[nodes[waits]] for nodes in (case.graph.edges.source_node, case.graph.edges.target))
    of_transfers = case.is_comm[source] | case.is_comm[target]
    waits, source, target = waits[of_transfers], source[of_transfers], target[of_transfers]
    shared = _share_queues(case, source, target)
    late, early = ~shared & case.is_comm[target], ~shared & ~case.is_comm[target]
    return [
        *_few_queues(case, target[shared], waits[shared]), *_late(case, target[late], waits[late]),
        *_early(case, source[early], target[early], waits[early]),
    ]  # fmt: skip


def _delays(case: Case, events: Ints) -> Floats:
    """How long each event waited after it was launched, its stream was free, and its input was ready."""
    waits, ready = case.graph.edges.keep(case.graph.edges.kind == ASSUMED), np.zeros(len(case.graph.start))
    np.maximum.at(ready, waits.target, case.graph.recorded.end[waits.source_node])
    return case.view.start[events] - np.maximum(case.view.ready, ready[case.nodes.event])[events]


def _share_queues(case: Case, source: Ints, target: Ints) -> Mask:
    """Whether the streams of each pair of events may share a hardware queue."""
    view = case.view
    shared = np.zeros(len(source), bool)
    if view.queues is not None and view.queues >= len(np.unique(view.stream)):
        return shared
    pairs = np.sort(np.stack([view.stream[source], view.stream[target]], axis=1), axis=1)
    for pair in np.unique(pairs, axis=0):
        same = (pairs == pair).all(axis=1)
        shared |= same & (case.is_comm[source[same]].any() and _in_launch_order(case, *pair))
    return shared


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
    start, end = view.start[events] - delays, np.where(case.is_comm, view.end, view.start)[events]
    return [case.finding("few-queues", events, start, end, evidence, without(waits), costs=delays)]


def _late(case: Case, events: Ints, waits: Ints) -> list[Finding]:
    """Transfers that were put behind unrelated work."""
    view, source_of = case.view, _inputs(case, ASSUMED)
    behind = _behind_later(case, source_of)
    moved = {event: source_of[event] for event in events.tolist() if event in source_of and view.launch[event] >= 0}
    moved |= {event: source_of[event] for event in behind}
    every = np.concatenate([events, np.array([*behind], np.int64)])
    if not len(every):
        return []
    drop, earlier = without(waits), _launched_with(case, moved)
    waited = np.concatenate([_delays(case, events), np.array([*behind.values()])])
    worst = int(np.argmax(waited))
    evidence = (
        f"The input of {len(every):,} transfers was ready, but they started later: {waited.sum():,.0f} us in "
        f"total, {waited[worst]:,.0f} us at most ({case.place(every[worst])}).",
        "Until then, work ran that was launched earlier and that they do not need."
        + case.launched_behind(every[worst]),
    )
    start, end = view.start[every], view.end[every]
    return [
        case.finding(
            "late-launch", every, start - waited, end, evidence, lambda graph: earlier(drop(graph)), costs=waited
        )
    ]


def _early(case: Case, source: Ints, target: Ints, waits: Ints) -> list[Finding]:
    """Computation that waits for transfers of the other chunk. Without the cause, their own chunk waits for them."""
    if not len(target):
        return []
    view, delays = case.view, _delays(case, target)
    needing = np.array([
        next((e for e in range(at, len(view.kind)) if view.kind[e] == COMPUTE and view.letters[e] == letter), -1)
        for letter, at in zip([view.letters[transfer] for transfer in source], target.tolist(), strict=True)
    ])  # fmt: skip
    evidence = (
        f"{len(target):,} times, computation waited for a transfer of the other micro-batch: {delays.sum():,.0f} us in "
        f"total, {delays.max():,.0f} us at most.",
    )
    drop, nodes = without(waits), case.nodes.event
    known = needing >= 0
    needed = edges(ends(nodes[source[known]]), nodes[needing[known]], 0.0, DATA)

    def change(graph: Graph) -> Graph:
        graph = drop(graph)
        return replace(graph, edges=merged([graph.edges, needed]))

    start = view.start[target]
    return [case.finding("early-wait", target, start - delays, start, evidence, change, costs=delays)]


def _inputs(case: Case, *kinds: int) -> dict[int, int]:
    """The last known input of each event."""
    waits = case.graph.edges.keep(np.isin(case.graph.edges.kind, kinds))
    return dict(zip(case.event_of[waits.target].tolist(), case.event_of[waits.source_node].tolist(), strict=True))


def _behind_later(case: Case, source_of: Mapping[int, int]) -> dict[int, float]:
    """Transfers that wait on their stream for an earlier transfer, whose input was launched after their own input.

    Returns how much later these transfers start than if they had gone first.
    """
    view, all_of = case.view, _inputs(case, ASSUMED, DATA)
    found: dict[int, float] = {}
    for event, source in source_of.items():
        before = int(view.previous[event])
        if not case.is_comm[event] or view.letters[event] is None or before not in all_of:
            continue
        if view.launch[all_of[before]] <= view.launch[source] or view.start[event] > view.end[before] + NEAR:
            continue
        while before >= 0 and view.launch[before] > view.launch[source]:
            before = int(view.previous[before])
        since = max(view.end[source], view.end[before] if before >= 0 else 0.0)
        if view.start[event] > since + LATE:
            found[event] = view.start[event] - since
    return found


def _launched_with(case: Case, moved: Mapping[int, int]) -> Change:
    """A change that launches events directly after their inputs, and moves them in their stream accordingly."""
    view, nodes = case.view, case.nodes.event
    events, inputs = (np.array([*column], np.int64) for column in (moved.keys(), moved.values()))
    place, before = view.launch.astype(np.float64), view.previous.copy()
    place[events] = view.launch[inputs] + 0.5
    for stream in np.unique(view.stream[events]):
        ordered = np.flatnonzero(view.stream == stream)
        if (view.launch[ordered] >= 0).all():
            ordered = ordered[np.argsort(place[ordered], kind="stable")]
            before[ordered] = np.concatenate([[-1], ordered[:-1]])
    launches = len(case.graph.start) + nodes
    launched = rewired(launches[events], case.graph.edges.source[launches[inputs]])
    following = np.where(before >= 0, ends(nodes[before]), -1)
    other = np.flatnonzero(before != view.previous)
    in_order = rewired(nodes[other], following[other])
    return lambda graph: in_order(launched(graph))
