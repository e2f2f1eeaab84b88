"""Work that could start, but starts only when unrelated work ends:

few-queues      Computation and transfers share a hardware queue, which starts work in the order of launch. The signs:
                all work of both streams started in that order, and computation also waited for transfers.
late-launch     Otherwise. The transfer was put behind computation that it does not need, or behind another transfer
                whose input came later.
early-wait      Computation waits for a transfer of the other micro-batch.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from .dependencies import LATE, NEAR
from .device import COMPUTE, Device, FoundCause
from .replay import ASSUMED, DATA, ORDER, Edges, Floats, Graph, Ints, Mask, edges, ends, merged, previous_of, without

LEAST = 3
"""Minimum number of occurrences of a pattern."""


def find(device: Device) -> list[FoundCause]:
    """Find transfers, and computation beside transfers, that wait for unrelated work."""
    rows = np.flatnonzero(device.graph.edges.kind == ORDER)
    source, target = device.graph.edges.source_node[rows], device.graph.edges.target[rows]
    of_transfers = device.is_comm[source] | device.is_comm[target]
    rows, source, target = rows[of_transfers], source[of_transfers], target[of_transfers]
    shared = _share_queues(device, source, target)
    late, early = ~shared & device.is_comm[target], ~shared & ~device.is_comm[target]
    return [
        *_few_queues(device, target[shared], rows[shared]), *_late(device, target[late], rows[late]),
        *_early(device, source[early], target[early], rows[early]),
    ]  # fmt: skip


def _delays(device: Device, events: Ints) -> Floats:
    """How long each event waited after it was launched, its stream was free, and its input was ready."""
    inputs, ready = device.graph.edges.keep(device.graph.edges.kind == ASSUMED), np.maximum(device.ready, 0.0)
    np.maximum.at(ready, inputs.target, device.graph.recorded.end[inputs.source_node])
    return (device.start - ready)[events]


def _share_queues(device: Device, source: Ints, target: Ints) -> Mask:
    """Whether the streams of each pair of events may share a hardware queue."""
    shared = np.zeros(len(source), bool)
    if device.trace.queues is not None and device.trace.queues >= len(np.unique(device.stream)):
        return shared
    pairs = np.sort(np.stack([device.stream[source], device.stream[target]], axis=1), axis=1)
    for pair in np.unique(pairs, axis=0):
        same = (pairs == pair).all(axis=1)
        shared |= same & (device.is_comm[source[same]].any() and _in_launch_order(device, *pair))
    return shared


def _in_launch_order(device: Device, one: int, other: int) -> bool:
    """Whether no event of one stream started before an event that had been launched earlier on the other stream."""
    events = np.flatnonzero(np.isin(device.stream, (one, other)) & (device.launch >= 0))
    events = events[np.argsort(device.launch[events], kind="stable")]
    starts, is_one = device.start[events], device.stream[events] == one
    for mask in (is_one, ~is_one):
        latest = np.maximum.accumulate(np.where(mask, starts, -np.inf))
        if (starts[~mask] < latest[~mask] - LATE).any():
            return False
    return True


def _few_queues(device: Device, events: Ints, rows: Ints) -> list[FoundCause]:
    if len(events) < LEAST:
        return []
    delays = _delays(device, events)
    setting = "" if device.trace.queues is None else f" CUDA_DEVICE_MAX_CONNECTIONS is {device.trace.queues}."
    start, end = device.start[events] - delays, np.where(device.is_comm, device.end, device.start)[events]
    change = partial(without, rows=rows)
    return device.found("few-queues", events, change, start, end, costs=delays, setting=setting)


def _late(device: Device, events: Ints, rows: Ints) -> list[FoundCause]:
    """Transfers behind unrelated work. Without the cause, they are launched directly after their inputs."""
    input_of = _inputs(device, ASSUMED)
    behind = _behind_later(device, input_of)
    every = np.concatenate([events, np.array([*behind], np.int64)])
    if not len(every):
        return []
    moved = every[(input_of[every] >= 0) & (device.launch[every] >= 0)]
    waited = np.concatenate([_delays(device, events), np.array([*behind.values()])])
    worst = every[np.argmax(waited)]
    return device.found(
        "late-launch", every,
        partial(_launched_with, device=device, rows=rows, events=moved, inputs=input_of[moved]),
        device.start[every] - waited, costs=waited,
        place=device.place(worst), behind=device.launched_behind(worst),
    )  # fmt: skip


def _inputs(device: Device, *kinds: int) -> Ints:
    """The last known input of each event; -1 if unknown."""
    known, found = device.graph.edges.keep(np.isin(device.graph.edges.kind, kinds)), np.full(len(device.events), -1)
    found[known.target] = known.source_node
    return found


def _behind_later(device: Device, input_of: Ints) -> dict[int, float]:
    """Transfers queued behind a transfer of their stream whose input was launched later than theirs.

    Returns how much later these transfers start than if they had gone first.
    """
    before_of, every_input = device.previous, _inputs(device, ASSUMED, DATA)
    found: dict[int, float] = {}
    for event in np.flatnonzero(device.is_comm & (input_of >= 0) & (every_input[before_of] >= 0)).tolist():
        own, before = input_of[event], int(before_of[event])
        if before < 0 or device.chunks[event] is None or device.launch[every_input[before]] <= device.launch[own]:
            continue
        if device.start[event] > device.end[before] + NEAR:
            continue
        while before >= 0 and device.launch[before] > device.launch[own]:
            before = int(before_of[before])
        since = float(max(device.end[own], device.end[before] if before >= 0 else 0.0))
        if device.start[event] > since + LATE:
            found[event] = float(device.start[event]) - since
    return found


def _launched_with(graph: Graph, device: Device, rows: Ints, events: Ints, inputs: Ints) -> Graph:
    """Drop edges, and launch events directly after their inputs: before other events that are launched later.

    A stream does its work in the new order of the launches.
    """
    launched, source, lag = device.launch.astype(float), graph.edges.source.copy(), graph.edges.lag.copy()
    launches = len(graph.start)  # the edges that follow those to the nodes before
    source[launches + events] = source[launches + inputs]
    for event in np.flatnonzero(launched < 0).tolist():  # unknown: in its recorded place
        launched[event] = launched[device.previous[event]] if device.previous[event] >= 0 else 0.0
    launched[events] = device.launch[inputs]
    order = np.lexsort((launched, device.stream))
    previous = np.full(len(order), -1, np.int64)
    before = previous_of(device.stream[order])
    previous[order] = np.where(before >= 0, order[before], -1)
    moved = np.flatnonzero((previous != device.previous) & np.isin(device.stream, device.stream[events]))
    source[moved] = ends(previous[moved])
    lag[moved] = np.where(previous[moved] >= 0, 0.0, -np.inf)
    return without(replace(graph, edges=graph.edges._replace(source=source, lag=lag)), rows)


def _early(device: Device, source: Ints, target: Ints, rows: Ints) -> list[FoundCause]:
    """Computation that waits for a transfer of the other chunk. Without the cause, the transfer's own chunk waits."""
    start, delays = device.start[target], _delays(device, target)
    needing = np.array([
        next((e for e in range(at, len(device.kind)) if device.kind[e] == COMPUTE and device.chunks[e] == chunk), -1)
        for chunk, at in zip([device.chunks[transfer] for transfer in source], target.tolist(), strict=True)
    ], np.int64)  # fmt: skip
    known = needing >= 0
    needed = edges(ends(source[known]), needing[known], 0.0, DATA)
    change = partial(_with_needed, rows=rows, needed=needed)
    return device.found("early-wait", target, change, start - delays, start, costs=delays)


def _with_needed(graph: Graph, rows: Ints, needed: Edges) -> Graph:
    """Drop edges and add those that are needed."""
    graph = without(graph, rows)
    return replace(graph, edges=merged([graph.edges, needed]))
