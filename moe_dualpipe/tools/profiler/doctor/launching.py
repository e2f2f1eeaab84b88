"""The host: calls that wait for the device, activities that keep it from launching, and launches that come too late.

After a call that waits for the device, nothing is queued, so the device idles until the host is ahead again. Without
the wait, the host would have stayed ahead. Launches that would be late even then are late because the host itself is
slow, or because it did something else: allocated memory, loaded data, saved a checkpoint, or was in the optimizer.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from ....messages import plural
from ..account import ALLOCATING, CHECKPOINT, LOADER, OPTIMIZER, host_spans
from ..intervals import EMPTY, Intervals, as_intervals, difference, intersection, length_before, union, union_length
from ..trace import innermost
from .calls import AT_ONCE
from .dependencies import LATE
from .device import COMM, Device, FoundCause, most_costly
from .replay import Floats, Graph, Ints, shorter, without

SHORT = 10.0
"""Microseconds: about the time that one launch takes."""
ACTIVITIES = {ALLOCATING: "allocator", LOADER: "data-loader", CHECKPOINT: "checkpoint", OPTIMIZER: "slow-optimizer"}
"""The causes, by what the host did."""


def find(device: Device) -> list[FoundCause]:
    """Find all causes of the host. Each may follow from those before it."""
    if device.is_cpu:
        return [*_waits_at_once(device), *_busy_thread(device)]
    whole = np.array([[0.0, device.window_us]])
    spans = {
        kind: intersection(union(as_intervals(row[:2] for row in rows)) - device.origin, whole)
        for kind, rows in host_spans(device.trace).items() if kind in ACTIVITIES
    }  # fmt: skip
    activities = [found for kind, key in ACTIVITIES.items() for found in _activity(device, key, spans[kind])]
    waiting = union(np.concatenate([spans[ALLOCATING], spans[LOADER], spans[CHECKPOINT]]))
    every = union(np.concatenate([EMPTY, *spans.values()]))
    return [*_syncs(device, waiting), *activities, *_late_host(device, every), *_short_kernels(device)]


def _syncs(device: Device, activities: Intervals) -> list[FoundCause]:
    """Calls in which the host waits for the device, outside of other activities."""
    rows, calls = device.syncs
    outside = _us_in_calls(device, activities)[calls] == 0
    rows, calls = rows[outside], calls[outside]
    awaited_end = device.call_ends[calls] - device.graph.edges.lag[rows]
    first, known = np.full(len(device.calls) + 1, device.window_us), device.launch >= 0
    np.minimum.at(first, device.launch[known], device.start[known])
    following = np.maximum(np.minimum.accumulate(first[::-1])[::-1][calls + 1], awaited_end)
    costs = device.without_computation(awaited_end, following)
    starts = zip((device.call_starts[calls] + device.origin).tolist(), calls.tolist(), strict=True)
    around = innermost(device.trace.annotations, starts)
    names = [device.calls[call].name for call in calls.tolist()]
    return device.found(
        "host-sync", calls, partial(without, rows=rows), awaited_end, following, costs=costs,
        places=[
            f"{name} in {around[call].name}" if call in around else name
            for call, name in zip(calls.tolist(), names, strict=True)
        ],
        call=most_costly(names, costs), waited=(device.call_ends - device.call_starts)[calls].sum(),
        emptied=(costs > LATE).sum(),
    )  # fmt: skip


def _us_in_calls(device: Device, spans: Intervals) -> Floats:
    """How much of each call is inside `spans`."""
    before = length_before(spans)
    return before(device.call_ends) - before(device.call_starts)


def _activity(device: Device, key: str, spans: Intervals) -> list[FoundCause]:
    """An activity of the host during which the device had nothing to do."""
    start, end = intersection(spans, device.idle).T
    following = np.minimum(np.searchsorted(device.start, end), len(device.start) - 1)
    rows, calls = device.syncs
    waits, change = rows[_us_in_calls(device, spans)[calls] > 0], _host_without(device, spans)
    return device.found(
        key, following, lambda graph: without(change(graph), waits), start, end,
        times=plural(len(spans), "time"), spent=union_length(spans),
    )  # fmt: skip


def _late_host(device: Device, activities: Intervals) -> list[FoundCause]:
    """Work that starts late because the host had not launched it."""
    known = np.flatnonzero((device.launch >= 0) & (device.kind != COMM))
    start, launched, free = device.start[known], device.launch_end[known], np.maximum(device.free[known], 0.0)
    waited = (start - launched)[free < launched]
    launched += max(0.0, float(np.percentile(waited, 5))) if len(waited) else 0.0  # it cannot start sooner
    late = np.maximum(np.minimum(launched, start) - free, 0.0)
    late[start - launched > SHORT] = 0.0  # started long after the launch: it waited for something else
    costs = device.without_computation(free, free + late)
    if len(known) < 2 or not (costs > LATE).any():
        return []
    whole = np.array([[min(0.0, device.call_starts.min()) - 1.0, max(device.window_us, launched.max()) + 1.0]])
    return device.found(
        "host-bound", known, _host_without(device, difference(whole, activities)), free, free + late, costs=costs,
        cost_us=union_length(intersection(union(np.stack([free, free + late], axis=1)), device.gaps)),
        late=(costs > LATE).sum(), latency=device.latency,
    )  # fmt: skip


def _busy_thread(device: Device) -> list[FoundCause]:
    """Times in which a CPU neither computes nor waits for a transfer."""
    busy = difference(device.gaps, device.waits)
    start, end = busy.T
    following = np.minimum(np.searchsorted(device.start, end), len(device.start) - 1)
    nodes = np.arange(len(device.graph.start))
    change = partial(_without_host, nodes=nodes, us=np.zeros(len(nodes)), spans=busy)
    return device.found("host-bound/thread", following, change, start, end)


def _host_without(device: Device, spans: Intervals) -> partial[Graph]:
    """A change after which the host takes no time in `spans`, except for its waits."""
    return partial(_without_host, nodes=device.call_nodes, us=_us_in_calls(device, spans), spans=spans)


def _without_host(graph: Graph, nodes: Ints, us: Floats, spans: Intervals) -> Graph:
    """Shorten calls, and the time before them, by what is inside `spans`. us: of each call."""
    before, lag, start = length_before(spans), graph.edges.lag.copy(), graph.start[nodes]
    lag[nodes] -= before(start) - before(start - np.maximum(lag[nodes], 0.0))
    return replace(shorter(graph, nodes, us), edges=graph.edges._replace(lag=lag))


def _short_kernels(device: Device) -> list[FoundCause]:
    """Gaps between kernels that were queued."""
    gaps = device.idle
    following = np.searchsorted(device.start, gaps[:, 1])
    length = gaps[:, 1] - gaps[:, 0]
    queued = (device.launch_end[following] <= gaps[:, 0]) & (length <= SHORT)
    gaps, length, following = gaps[queued], length[queued], following[queued]
    kernel = np.median(device.duration[following]) if len(following) else SHORT
    if kernel >= SHORT:
        return []
    start, end = gaps.T
    return device.found("short-kernels", following, None, start, end, gap=np.median(length), kernel=kernel)


def _waits_at_once(device: Device) -> list[FoundCause]:
    """Segments of a CPU that wait for transfers that they have just started."""
    rows, calls = device.syncs
    at_once = np.array([device.calls[call].name == AT_ONCE for call in calls.tolist()], bool)
    calls, rows = calls[at_once], rows[at_once]
    start, end = device.call_starts[calls], device.call_ends[calls]
    return device.found(
        "host-sync/thread", device.awaited[calls], partial(without, rows=rows), start, end,
        cases=plural(len(calls), "case"), waited=(end - start).sum(),
    )  # fmt: skip
