"""Transfers and copies: those that nothing is computed beside, that wait for other ranks, that take longer than others
alike, and small ones that take as long as their latency.

A collective ends on all ranks together, after the last one has joined. With the traces of several ranks, the shortest
duration is that of the last rank, and what others take longer is waiting (imbalance). Differences that remain are due
to the link (slow transfers). With the trace of one rank, the two cannot be told apart.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np

from ....messages import plural
from ....overlap.labels import GATHER_WEIGHTS, SUM_GRADIENTS
from ..account import copy_name
from ..categories import category_of_kernel
from ..communication import kind_of_collective
from ..intervals import EMPTY, Intervals, difference, intersection, length_before, union, union_length
from ..trace import CLOCK
from .device import COMM, COMPUTE, COPY, Device, FoundCause
from .replay import DATA, SYNC, Floats, Graph, Ints, Mask, NodeTimes, shorter, without

LEAST = 4
"""Minimum number of transfers of one kind and size, to compare them."""
LONG = 1.5
"""A transfer is long if it takes this many times as long as the fastest quarter of its kind and size."""
OFTEN = 0.02
"""Waits below this share of the transfers' time are ordinary."""
MOVES = 0.75
"""If no rank is waited for during this share of the waits, the late rank changes."""
SOON_AFTER_SMALL, SOON = 50.0, 30.0
"""Microseconds, at most, between small transfers that could be one; and from the end of a transfer to the start of a
computation that waited for it."""
LEAST_RATE = 5e3
"""Elements per microsecond of a link, at least: what small transfers would take together."""
SMALL_ELEMENTS, SMALL_US = 1 << 17, 100.0
"""A transfer is small if it has at most so many elements, as far as known, and takes at most so long."""
OTHERWISE = "nothing-to-overlap"
"""The cause of exposed transfers of no known purpose, and of several purposes that cost little."""
_BUCKETS = 0.5
"""If a larger share of the sums of gradients is hidden, only the last of several buckets is exposed."""
_INTERLEAVED = 0.3
"""If a larger share of the communication is hidden, two micro-batches run beside each other."""


def find(device: Device, rank_names: Sequence[str], slowed_us: Floats) -> list[FoundCause]:
    """Find exposed sends and receives of a pipeline, copies and fills; waits for other ranks; slow and small transfers.

    slowed_us: how much longer each event took because of computation beside it.
    """
    longer = [*_imbalance(device, rank_names), *_long(device, device.own_us - slowed_us)]
    return [*_pipeline(device), *_copies(device), *longer, *_small(device)]


def _imbalance(device: Device, rank_names: Sequence[str]) -> list[FoundCause]:
    waited = device.waited_us
    if waited.sum() <= OFTEN * device.duration[device.is_comm].sum():
        return []
    joined = device.last >= 0
    own_waits, every_wait = (np.bincount(device.last[joined], us[joined]) for us in (waited, device.longest_wait_us))
    ranks = [
        f"{own_waits[rank] / own_waits.sum():.0%} of that was for {rank_names[rank]}"
        for rank in np.argsort(-own_waits).tolist() if own_waits[rank] > 0
    ]  # fmt: skip
    key = "imbalance" if every_wait.max() >= MOVES * every_wait.sum() else "imbalance/moving"
    events = np.flatnonzero(waited)
    return device.longer(key, events, waited[events], ranks=", ".join(ranks[:3]))


def same_kind(device: Device, event: int) -> tuple[object, ...]:
    """Transfers for which this is equal should take equally long."""
    found = device.events[event]
    c = found.collective
    if c is None or c.in_elems is None:
        return found.name, found.blocks, found.bytes, device.labels[event]
    return found.name, c.name, c.group, c.ranks, c.in_elems, c.out_elems, c.dtype, c.peer


def _long(device: Device, own: Floats) -> list[FoundCause]:
    """Transfers that take longer than the fastest quarter of their kind. own: how long each transfer takes alone."""
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    on_links = device.is_comm & ~(device.is_cpu & device.is_point_to_point)  # of those, a CPU shows waits only
    for event in np.flatnonzero(on_links).tolist():
        alike[same_kind(device, event)].append(event)
    usual = own.copy()
    for same in alike.values():
        base = float(np.percentile(own[same], 25))
        if len(same) >= LEAST:
            usual[same] = np.where(own[same] > LONG * base, base, own[same])
    return [
        *_longer_than(device, "slow-transfer", own, usual, device.last >= 0),
        *_longer_than(device, "imbalance/one rank", own, usual, device.last < 0),
    ]


def _longer_than(device: Device, key: str, own: Floats, usual: Floats, chosen: Mask) -> list[FoundCause]:
    events = np.flatnonzero((own > usual) & chosen)
    if not len(events):
        return []
    own, usual = own[events], usual[events]
    worst = int(np.argmax(own - usual))
    return device.longer(
        key, events, own - usual, transfers=device.is_comm.sum(), ratio=np.median(own / usual), longest=own[worst],
        usual=usual[worst],
    )  # fmt: skip


def _small(device: Device) -> list[FoundCause]:
    """Runs of small transfers of one kind, which would take as long together as one of them."""
    every = np.flatnonzero(device.is_comm)
    every = every[np.argsort(device.stream[every], kind="stable")].tolist()
    elements, kind = np.zeros(len(device.events)), dict[int, tuple[object, ...]]()
    for event in every:
        found = device.events[event].collective
        kind[event] = device.stream[event], *((found.name, found.group) if found else (device.events[event].name,))
        elements[event] = max(found.in_elems or 0, found.out_elems or 0) if found else 0
    small = (device.own_us <= SMALL_US) & (elements <= SMALL_ELEMENTS)
    further = np.array([
        b for a, b in pairwise(every)
        if small[a] and small[b] and kind[a] == kind[b] and device.start[b] - device.end[a] <= SOON_AFTER_SMALL
    ], np.int64)  # fmt: skip
    if not len(further):
        return []
    launches, own = device.launch[further], device.own_us[further]
    change = partial(
        _joined_with_previous, calls=device.call_nodes[launches[launches >= 0]], nodes=further,
        moving=elements[further] / LEAST_RATE,
    )  # fmt: skip
    return device.found("small-messages", further, change, each=np.median(own), together=own.sum())


def _joined_with_previous(graph: Graph, calls: Ints, nodes: Ints, moving: Floats) -> Graph:
    """Drop calls and the host's work for them. The nodes that they launched only take the time to move their data."""
    lag, duration, either = graph.edges.lag.copy(), graph.duration.copy(), np.concatenate([nodes, calls])
    lag[either] = np.minimum(lag[either], 0.0)
    duration[nodes], duration[calls] = np.minimum(moving, duration[nodes]), 0.0
    return replace(graph, edges=graph.edges._replace(lag=lag), duration=duration)


def _pipeline(device: Device) -> list[FoundCause]:
    """Sends and receives for which computation waits."""
    waits, events = device.graph.edges, np.flatnonzero(device.is_point_to_point)
    start, end = device.start[events], device.end[events]
    exposed = union_length(intersection(union(np.stack([start, end], axis=1)), device.gaps))
    awaited = np.isin(waits.kind, (DATA, SYNC)) & np.isin(waits.source_node, events)
    rows = np.flatnonzero(awaited)
    return device.found("exposed-pipeline", events, partial(without, rows=rows), cost_us=exposed)


def _copies(device: Device) -> list[FoundCause]:
    """Copies and fills on the path of the computation."""
    found = []
    exposed = length_before(device.outside(COMPUTE))
    fills = np.array(["memset" in event.name.lower() for event in device.events], bool)
    for key, wanted in (("copies", ~fills), ("memsets", fills)):
        events = np.flatnonzero((device.kind == COPY) & wanted)
        start, end = device.start[events], device.end[events]
        costs = exposed(end) - exposed(start)
        found += device.found(
            key, events, partial(shorter, nodes=events, us=costs), costs=costs,
            places=[copy_name(device.events[event]) for event in events.tolist()],
            size=sum(device.events[event].bytes for event in events.tolist()),
        )  # fmt: skip
    return found


def find_nothing_else(
    device: Device, repaired: NodeTimes, explained: Intervals, least_us: float
) -> list[FoundCause]:  # fmt: skip
    """Transfers for which the next computation waits while nothing else is queued.

    repaired: the times without all other causes. explained: what these causes explain. Transfers that are hidden then,
    or whose waits are explained, are not counted. least_us: the smallest cost; purposes that cost less are counted
    together.
    """
    gaps = _gaps_until_transfers(device)
    inside = length_before(gaps)
    transfers = device.is_comm & ~device.is_point_to_point & (inside(device.end) > inside(device.start))
    kinds = np.array([kind_of_collective(event) for event in device.events])
    labeled = np.array([label.startswith(SUM_GRADIENTS) for label in device.labels], bool)
    sums = device.is_comm & labeled if labeled.any() else kinds == "all_reduce"
    by_key, lacking = defaultdict[str, list[int]](list), _what_lacks(device)
    for event in np.flatnonzero(transfers).tolist():
        by_key[_purpose(device, event, str(kinds[event])) or lacking].append(event)
    found, small = list[FoundCause](), by_key.pop(OTHERWISE, [])
    for key, chosen in (*by_key.items(), (OTHERWISE, small)):
        events = np.sort(np.array(chosen, np.int64))
        start, end = device.start[events], device.end[events]
        waited = intersection(union(np.stack([start, end], axis=1)), gaps)
        cost, inside = union_length(waited), length_before(waited)
        still_exposed = min(cost, _still_exposed(device, events, repaired))
        if max(still_exposed, union_length(difference(waited, explained))) < least_us:
            small += chosen
            continue
        costs = inside(end) - inside(start)
        worst = int(events[np.argmax(costs)])
        if key == "sum-at-end" and cost < _BUCKETS * device.duration[sums].sum():
            key = "sum-at-end/last bucket"
        independent = key in ("sum-at-end", "exposed-weights")  # of the computation before or after them
        change = partial(shorter, nodes=events, us=costs) if independent else None
        [one] = device.found(
            key, events, change, costs=costs, cost_us=cost, transfers=plural(len(events), "transfer"),
            place=device.place(worst), behind=device.launched_behind(worst),
        )  # fmt: skip
        found.append(one._replace(spans=waited))
    return found


def _gaps_until_transfers(device: Device) -> Intervals:
    """Gaps that last until a transfer ends and a queued computation starts, or until the end of the window.

    On a CPU, nothing is queued, but waits are known, and a thread takes time to go on.
    """
    start, end = device.gaps.T
    ends = np.sort(device.end[device.is_comm & ~device.is_point_to_point])
    ended = np.append(ends, -np.inf)[np.searchsorted(ends, end + CLOCK, side="right") - 1]
    computing = np.flatnonzero(device.kind != COMM)
    launched = np.append(device.launched[computing], -np.inf)[np.searchsorted(device.start[computing], end)]
    waited = length_before(device.waits if device.is_cpu else EMPTY)
    soon = np.where(waited(end) - waited(start) > 0.5 * (end - start), end - start, SOON)
    return device.gaps[(np.maximum(start, end - soon) <= ended) & (launched < ended)]


def _purpose(device: Device, event: int, kind: str) -> str:
    """The cause of an exposed transfer, which depends on what it is for. Labels tell; in a run without labels, the kind
    of the collective. "": it is for a micro-batch."""
    label = device.labels[event]
    if label.startswith(SUM_GRADIENTS):
        return "sum-at-end"
    if label.startswith(GATHER_WEIGHTS) or (not device.has_labels and kind in ("all_gather", "reduce_scatter")):
        return "exposed-weights"
    if not device.has_labels and kind == "all_reduce" and _before_update(device, event):
        return "sum-at-end"
    if device.chunks[event] is None and (device.has_labels or kind != "all_to_all"):
        return OTHERWISE
    return ""


def _what_lacks(device: Device) -> str:
    """The cause of the exposed transfers of micro-batches."""
    hidden = union_length(intersection(device.spans(COMM), device.spans(COMPUTE, COPY)))
    interleaved = {"F", "B"} <= {*device.chunks} and hidden > _INTERLEAVED * union_length(device.spans(COMM))
    return f"nothing-to-overlap/{'interleaved' if interleaved else 'one chunk'}"


def _before_update(device: Device, event: int) -> bool:
    """Whether nothing but the optimizer computes after a transfer."""
    computing = device.computing
    after = int(np.searchsorted(device.start[computing], device.end[event] - CLOCK))
    return after == len(computing) or category_of_kernel(device.events[computing[after]].name) == "optimizer"


def _still_exposed(device: Device, transfers: Ints, repaired: NodeTimes) -> float:
    """How long nothing is computed during these transfers without the other causes."""
    spans = np.stack([repaired.start, repaired.end], axis=1)[: len(device.events)]
    chosen = union(spans[transfers])
    return union_length(chosen) - union_length(intersection(chosen, union(spans[~device.is_comm])))
