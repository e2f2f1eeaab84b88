"""The graph of dependencies of a view: from what a trace records, and from when things happened.

                 GPU                                                    CPU
host             one call after another, of all threads                 a thread does one thing after another
launch           a kernel follows its call, and the event before it     a transfer follows its call, and the transfer
                 on its stream                                          before it on its link
wait             a call returns when what it waits for has ended        the same
other streams    below                                                  none: computation is in the order of its thread

inferred     An event that could have started earlier, and starts within 5 us of the end of work on another stream,
             depends on it. If the host queued no wait for another stream, or the work belongs to the other chunk, or
             all queued waits have another input, it is not an input: such dependencies are ORDER, which a change may
             remove.
assumed      Inputs that were ready in time: of a transfer, the last computation launched before it (of its chunk); of a
             computation after a queued wait, the last transfer that had ended (of its chunk).

The assumed inputs are the latest that are possible. Gains are rather too small than too large.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

import numpy as np

from ..trace import CLOCK, WAKE_UP
from .replay import (
    ASSUMED,
    DATA,
    ORDER,
    SYNC,
    Edges,
    Floats,
    Graph,
    Ints,
    edges,
    ends,
    graph_of_nodes,
    merged,
    previous_of,
)
from .view import View

NEAR = 5.0
"""Microseconds after the end of its input in which an event starts."""
LATE = 2.0
"""Microseconds that an event must be late before a reason is looked for."""
_SHORT_CALL = 5.0  # what a call that waits takes without waiting
_GAP = 1.0  # between two kernels of a stream

Inputs = dict[int, int]
"""The event on another stream that an event needs."""


def graph_of(view: View) -> Graph:
    """Return the graph of a view, with its nodes numbered as in the view."""
    waiting, num_events = view.waiting_calls, len(view.events)
    start = np.concatenate([view.start, view.call_ends[waiting], view.call_starts])
    calls = np.zeros(len(view.calls)) if view.is_cpu else view.call_ends - view.call_starts
    calls[waiting] = np.minimum(calls[waiting], _SHORT_CALL)
    duration = np.concatenate([view.duration, np.zeros(len(waiting)), calls])
    before, launch = np.full(len(start), -1, np.int64), np.full(len(start), -1, np.int64)
    lag = np.zeros(len(start))
    before[:num_events] = view.previous
    lag[:num_events] = 0.0 if view.is_cpu else _GAP
    _add_hosts(view, start, duration, before, lag)
    launch[:num_events] = np.append(view.call_nodes, -1)[view.launch]
    waits = _waits_of_calls(view) if view.is_cpu else merged([_waits_of_calls(view), _between_streams(view)])
    is_device = np.arange(len(start)) < num_events
    return graph_of_nodes(is_device, start, duration, before, lag, launch, view.latency, waits)


def _add_hosts(view: View, start: Floats, duration: Floats, before: Ints, lag: Floats) -> None:
    """Calls and ends of waits follow what their thread did before, on a CPU also its computation.

    Beside a GPU, all threads count as one: autograd's thread runs while another one waits.
    """
    computing = np.flatnonzero(~view.is_comm & view.is_cpu)
    nodes = np.concatenate([view.wait_nodes, view.call_nodes, computing])
    of_call = [call.thread[1] if view.is_cpu else "" for call in view.calls]
    of_event = [view.events[event].stream for event in computing.tolist()]
    threads = np.array([*(of_call[call] for call in view.waiting_calls.tolist()), *of_call, *of_event])
    in_order = np.argsort(start[nodes], kind="stable")
    nodes = nodes[in_order]
    previous = previous_of(threads[in_order])
    before[nodes] = np.where(previous >= 0, nodes[previous], -1)
    lag[nodes] = np.where(previous >= 0, start[nodes] - (start + duration)[nodes[previous]], 0.0)
    lag[view.wait_nodes] = 0.0  # what remains of a wait is for its transfer


def _waits_of_calls(view: View) -> Edges:
    """A thread of a CPU takes time to go on: what exceeds it is not a part of the wait."""
    awaited = view.awaited[view.waiting_calls]
    most = WAKE_UP if view.is_cpu else np.inf
    lag = np.clip(view.call_ends[view.waiting_calls] - view.end[awaited], None, most)
    return edges(ends(awaited), view.wait_nodes, lag, SYNC)


def _between_streams(view: View) -> Edges:
    inputs = _assumed(view)
    binding = dict(_binding(view, inputs))
    found = [(source, target, kind) for target, (source, kind) in binding.items()]
    found += [(source, target, ASSUMED) for target, source in inputs.items() if binding.get(target) != (source, DATA)]
    source, target, kind = np.array(found, np.int64).reshape(-1, 3).T
    lag = np.where(kind == ASSUMED, 0.0, view.start[target] - view.end[source])
    return edges(ends(source), target, lag, kind)


def _same_chunk(view: View, one: int, other: int) -> bool:
    """Whether two events may belong to the same chunk."""
    return view.chunks[one] == view.chunks[other] or None in (view.chunks[one], view.chunks[other])


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
        ended.sort(key=lambda source: (source != known, not _same_chunk(view, source, target)))
        if ended and view.end[ended[0]] > view.ready[target] + CLOCK:
            yield target, (ended[0], DATA if _is_input(view, ended[0], target, known) else ORDER)


def _is_input(view: View, source: int, target: int, known: int) -> bool:
    every_wait_has_one = known >= 0 and view.num_waits[target] == 1 and view.chunks[target] is not None
    may_need = view.may_wait[target] and _same_chunk(view, source, target) and not every_wait_has_one
    return source == known or bool(may_need)


def _assumed(view: View) -> Inputs:
    """The inputs that were ready in time, as far as known."""
    found: Inputs = {}
    done: dict[tuple[bool, str | None], deque[int]] = defaultdict(lambda: deque(maxlen=16))
    order = np.argsort(view.launch, kind="stable")
    for target in order[view.launch[order] >= 0].tolist():
        is_comm, chunk = bool(view.is_comm[target]), view.chunks[target]
        source = _latest_input(view, target, done[not is_comm, chunk])
        if source is not None:
            found[target] = source
            if not is_comm and chunk is not None:
                done[True, chunk].remove(source)  # the stream waits for it once
        for known in {chunk, None}:
            done[is_comm, known].append(target)
    return found


def _latest_input(view: View, target: int, launched: Sequence[int]) -> int | None:
    """Computation can need all transfers; transfers need activations of their chunk."""
    is_comm, chunk = view.is_comm[target], view.chunks[target]
    if not view.may_wait[target] or (not is_comm and view.num_waits[target] < 0 and chunk is None):
        return None
    ended = [
        source for source in launched
        if view.end[source] <= view.start[target] + CLOCK and view.stream[source] != view.stream[target]
        and (not is_comm or chunk is None or (_same_chunk(view, source, target) and not view.is_wgrad[source]))
    ]  # fmt: skip
    if is_comm or not ended:
        return ended[-1] if ended else None
    return max(ended, key=lambda source: view.end[source])
