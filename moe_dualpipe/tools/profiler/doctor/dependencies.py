"""The graph of dependencies of a GPU's work, from what a trace records and from when things happened.

recorded     the order of calls in a thread with the host's work between them; launch -> kernel; the order of a
             stream; calls that wait for the device
inferred     an event that could have started earlier, and starts within 5 us of the end of work on another stream,
             depends on it. If the host queued no wait for another stream, or the work belongs to the other chunk,
             or all queued waits have another input, it is not an input: such dependencies are ORDER, which a
             change may remove
assumed      inputs that were there in time: of a transfer, the last computation launched before it (of its chunk);
             of a computation after a queued wait, the last transfer that had ended (of its chunk)

The assumed inputs are the latest that are possible. Gains are rather too small than too large.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

import numpy as np

from .replay import ASSUMED, DATA, ORDER, SYNC, Edges, Floats, Graph, Ints, edges, ends, graph_of_nodes, merged
from .view import COMM, View

NEAR = 5.0
"""Microseconds after the end of its input in which an event starts."""
LATE = 2.0
"""Microseconds that an event must be late before a reason is looked for."""
CLOCK = 1.0
"""Resolution of the clock, in microseconds."""
_SHORT_CALL = 5.0  # what a call that waits takes without waiting
_FULL_QUEUE = 900  # launches block when about 1,000 are queued
_BLOCKED = 100.0
_GAP = 1.0  # between two kernels of a stream

Inputs = dict[int, int]
"""The event on another stream that an event needs."""


class Nodes:
    """Where events and calls are in the graph: its node for each, by their index in the view."""

    def __init__(self, view: View, awaited: Ints):
        calls = len(view.calls)
        synced = np.flatnonzero(awaited >= 0)
        time = np.concatenate([view.call_ends[synced], view.call_starts[:calls], view.start])
        order = np.argsort(time, kind="stable")  # at the same time: ends of waits, calls, events
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        self.time = time[order]
        self.call = place[len(synced) : len(synced) + calls]
        self.call_end = self.call.copy()
        """The node whose end is the end of the call."""
        self.call_end[synced] = place[: len(synced)]
        self.event = place[len(synced) + calls :]


def graph_of(view: View) -> tuple[Graph, Nodes]:
    """Return the graph of a GPU and the nodes of the view's events and calls."""
    awaited = _awaited_events(view)
    nodes = Nodes(view, awaited)
    size = len(nodes.time)
    is_device, duration, before_lag = np.zeros(size, bool), np.zeros(size), np.zeros(size)
    before, launch = np.full(size, -1, np.int64), np.full(size, -1, np.int64)
    if view.calls:
        _add_calls(view, nodes, awaited, duration, before, before_lag)
    is_device[nodes.event], duration[nodes.event] = True, view.duration
    before[nodes.event] = np.where(view.previous >= 0, nodes.event[view.previous], -1)
    before_lag[nodes.event] = _GAP
    launched = view.launch >= 0
    launch[nodes.event[launched]] = nodes.call[view.launch[launched]]
    waits = merged([waits_of_calls(view, nodes, awaited), _between_streams(view, nodes)])
    return graph_of_nodes(is_device, nodes.time, duration, before, before_lag, launch, view.latency, waits), nodes


def _add_calls(
    view: View, nodes: Nodes, awaited: Ints, duration: Floats, before: Ints, before_lag: Floats
) -> None:  # fmt: skip
    """A call follows the call that ended last before it, on any thread: autograd's thread runs while another waits."""
    start, end = view.call_starts, view.call_ends
    duration[nodes.call] = np.where(awaited >= 0, np.minimum(end - start, _SHORT_CALL), end - start)
    synced = np.flatnonzero(awaited >= 0)
    before[nodes.call_end[synced]] = nodes.call[synced]
    by_end = np.argsort(end, kind="stable")
    last = np.searchsorted(end[by_end], start, side="right") - 1
    last -= (last >= 0) & (by_end[last] == np.arange(len(start)))  # a call without duration
    found = np.where(last >= 0, by_end[last], -1)
    before[nodes.call] = np.where(found >= 0, nodes.call_end[found], -1)
    before_lag[nodes.call] = start - end[found]


def _awaited_events(view: View) -> Ints:
    """The event for which each call waited: what ended last before it returned; -1 for calls that did not wait.

    Launches wait while the queue is full.
    """
    count = len(view.calls)
    start, end, number = view.call_starts[:count], view.call_ends[:count], np.arange(count)
    queued = np.searchsorted(np.sort(view.launch), number) - np.searchsorted(np.sort(view.start), start)
    full = np.isin(number, view.launch) & (queued >= _FULL_QUEUE) & (end - start > _BLOCKED)
    by_end = np.argsort(view.end, kind="stable")
    awaited = np.full(count, -1, np.int64)
    sync = np.array([call.sync for call in view.calls], bool)
    for call in np.flatnonzero(full | sync).tolist():
        first, last = np.searchsorted(view.end[by_end], [start[call] + CLOCK, end[call] + CLOCK], side="right")
        launched = by_end[first:last][view.launch[by_end[first:last]] <= call]
        awaited[call] = launched[-1] if len(launched) else -1
    return awaited


def waits_of_calls(view: View, nodes: Nodes, awaited: Ints, most_us: float = np.inf) -> Edges:
    """awaited: the event for which each call waited, or -1. most_us: what a wait takes at most once it has ended."""
    synced = np.flatnonzero(awaited >= 0)
    source, target = nodes.event[awaited[synced]], nodes.call_end[synced]
    return edges(ends(source), target, np.clip(nodes.time[target] - view.end[awaited[synced]], None, most_us), SYNC)


def _between_streams(view: View, nodes: Nodes) -> Edges:
    inputs = _assumed(view)
    binding = dict(_binding(view, inputs))
    found = [(source, target, kind) for target, (source, kind) in binding.items()]
    found += [(source, target, ASSUMED) for target, source in inputs.items() if binding.get(target) != (source, DATA)]
    source, target, kind = np.array(found, np.int64).reshape(-1, 3).T
    lag = np.where(kind == ASSUMED, 0.0, view.start[target] - view.end[source])
    return edges(ends(nodes.event[source]), nodes.event[target], lag, kind)


def same_chunk(view: View, one: int, other: int) -> bool:
    """Whether two events may belong to the same chunk."""
    return view.letters[one] == view.letters[other] or None in (view.letters[one], view.letters[other])


def _binding(view: View, inputs: Inputs) -> Iterator[tuple[int, tuple[int, int]]]:
    """Late events, what ended on another stream when each started, and whether it is an input: DATA or ORDER."""
    late = np.flatnonzero(view.start - view.ready > LATE)
    by_end = np.argsort(view.end, kind="stable")
    last = np.searchsorted(view.end[by_end], view.start[late] + CLOCK, side="right")
    first = np.searchsorted(view.end[by_end], view.start[late] - NEAR)
    for target, begin, end in zip(late.tolist(), first.tolist(), last.tolist(), strict=True):
        known = inputs.get(target, -1)
        ended = [
            source for source in by_end[begin:end][::-1].tolist()
            if view.stream[source] != view.stream[target] and source < target
        ]  # fmt: skip
        # the input if it is there, else work of the same chunk; of several, what ended last
        ended.sort(key=lambda source: (source != known, not same_chunk(view, source, target)))
        if ended and view.end[ended[0]] > view.ready[target] + CLOCK:
            yield target, (ended[0], DATA if _is_input(view, ended[0], target, known) else ORDER)


def _is_input(view: View, source: int, target: int, known: int) -> bool:
    every_wait_has_one = known >= 0 and view.num_waits[target] == 1 and view.letters[target] is not None
    may_need = view.may_wait[target] and same_chunk(view, source, target) and not every_wait_has_one
    return source == known or bool(may_need)


def _assumed(view: View) -> Inputs:
    found: Inputs = {}
    done: dict[tuple[bool, str | None], deque[int]] = defaultdict(lambda: deque(maxlen=16))
    order = np.argsort(view.launch, kind="stable")
    for target in order[view.launch[order] >= 0].tolist():
        is_comm, letter = bool(view.kind[target] == COMM), view.letters[target]
        source = _latest_input(view, target, done[not is_comm, letter])
        if source is not None:
            found[target] = source
            if not is_comm and letter is not None:
                done[True, letter].remove(source)  # the stream waits for it once
        for known in {letter, None}:
            done[is_comm, known].append(target)
    return found


def _latest_input(view: View, target: int, launched: Sequence[int]) -> int | None:
    """Computation can need all transfers; transfers need activations of their chunk."""
    is_comm, letter = view.kind[target] == COMM, view.letters[target]
    if not view.may_wait[target] or (not is_comm and view.num_waits[target] < 0 and letter is None):
        return None
    ended = [
        source for source in launched
        if view.end[source] <= view.start[target] + CLOCK and view.stream[source] != view.stream[target]
        and (not is_comm or letter is None or (same_chunk(view, source, target) and not view.is_wgrad[source]))
    ]  # fmt: skip
    if is_comm or not ended:
        return ended[-1] if ended else None
    return max(ended, key=lambda source: view.end[source])
