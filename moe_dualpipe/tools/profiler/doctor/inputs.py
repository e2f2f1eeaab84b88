"""What work on a device waits for on other streams: as recorded, or as far as times, labels and calls tell.

    recorded     where the trace has the events that streams wait for (torch.profiler with enable_cuda_sync_events)
    inferred     an event that could have started earlier, and starts within 5 us of the end of work on another stream,
                 depends on it. If the host queued no wait for another stream, or the work belongs to the other chunk,
                 or all queued waits have another input, it is not an input: such dependencies are ORDER, which a
                 change may remove
    assumed      inputs that were there in time: of a transfer, the last computation launched before it (of its chunk);
                 of a computation after a queued wait, the last transfer that had ended (of its chunk)

The assumed inputs are the latest that are possible. Gains are rather too small than too large.
"""

from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np

from .replay import ASSUMED, DATA, ORDER, Floats, Ints
from .view import COMM, View

NEAR = 5.0
"""Microseconds after the end of its input in which an event starts."""
NEAR_ON_CPU = 500.0
"""The same for threads, which take time to wake up."""
LATE = 2.0
"""Microseconds that an event must be late before a reason is looked for."""
CLOCK = 1.0
"""Resolution of the clock, in microseconds."""
_HISTORY = 16
_NEAREST = 256

Inputs = dict[int, list[int]]
"""The events on other streams that an event needs."""
Edges = tuple[list[int], list[int], list[int]]
"""Sources, targets and kinds (replay.py)."""


def edges_of(view: View, ready: Floats) -> Edges:
    """Return the dependencies between streams. ready: when each event was launched and its stream was free."""
    inputs = _assumed(view) if view.recorded_inputs is None else _needed(view, view.recorded_inputs)
    edges: Edges = ([], [], [])
    binding = _binding(view, ready, inputs)
    for target, (source, kind) in binding.items():
        _add(edges, source, target, kind)
    for target, sources in inputs.items():
        for source in sources:
            if binding.get(target) != (source, DATA):
                _add(edges, source, target, ASSUMED)
    return edges


def _add(edges: Edges, *edge: int) -> None:
    for column, value in zip(edges, edge, strict=True):
        column.append(value)


def same_chunk(view: View, one: int, other: int) -> bool:
    """Whether two events may belong to the same chunk."""
    a, b = view.letters[one], view.letters[other]
    return a is None or b is None or a == b


def _binding(view: View, ready: Floats, inputs: Inputs) -> dict[int, tuple[int, int]]:
    """What ended on another stream when a late event started, and whether it is an input: DATA or ORDER."""
    late = np.flatnonzero(view.start - ready > LATE)
    by_end = np.argsort(view.end, kind="stable")
    last = np.searchsorted(view.end[by_end], view.start[late] + CLOCK, side="right") - 1
    found: dict[int, tuple[int, int]] = {}
    for target, at in zip(late.tolist(), last.tolist(), strict=True):
        known = inputs.get(target, ())
        source = _ended_elsewhere(view, by_end, at, target, known)
        if source >= 0 and view.end[source] > ready[target] + CLOCK:
            found[target] = source, DATA if _is_input(view, source, target, known) else ORDER
    return found


def _ended_elsewhere(view: View, by_end: Ints, at: int, target: int, known: Sequence[int]) -> int:
    """The last event on another stream that ended just before `target` started: an input if there is one, else of the
    same chunk."""
    same, other, near = -1, -1, NEAR_ON_CPU if view.is_cpu else NEAR
    while at >= 0 and view.end[by_end[at]] >= view.start[target] - near:
        source = int(by_end[at])
        if view.stream[source] != view.stream[target] and source < target:
            if source in known:
                return source
            if same < 0 and same_chunk(view, source, target):
                same = source
            other = source if other < 0 else other
        at -= 1
    return same if same >= 0 else other


def _is_input(view: View, source: int, target: int, known: Sequence[int]) -> bool:
    if source in known:
        return True
    if view.recorded_inputs is not None:
        return False
    every_wait_has_one = 0 < view.num_waits[target] <= len(known) and view.letters[target] is not None
    return bool(view.may_wait[target]) and same_chunk(view, source, target) and not every_wait_has_one


def _needed(view: View, recorded: Inputs) -> Inputs:
    """Recorded inputs; of transfers, the last work up to these on its stream that belongs to their chunk."""
    of_stream = {stream: np.flatnonzero(view.stream == stream) for stream in np.unique(view.stream).tolist()}
    found: Inputs = {}
    for target, sources in recorded.items():
        found[target] = needed = []
        for source in sources:
            queue = of_stream[int(view.stream[source])]
            at = int(np.searchsorted(queue, source))
            alike = (int(e) for e in queue[max(at - _NEAREST, 0) : at + 1][::-1] if _may_need(view, int(e), target))
            needed.append(next(alike, source))
    return found


def _may_need(view: View, source: int, target: int) -> bool:
    """Whether `target` can need `source`: computation can need all, transfers need activations of their chunk."""
    if view.kind[target] != COMM or view.letters[target] is None:
        return True
    return same_chunk(view, source, target) and not view.is_wgrad[source]


def _assumed(view: View) -> Inputs:
    found: Inputs = {}
    done: dict[tuple[bool, str | None], deque[int]] = defaultdict(lambda: deque(maxlen=_HISTORY))
    order = np.argsort(view.launch, kind="stable")
    for target in order[view.launch[order] >= 0].tolist():
        is_comm, letter = bool(view.kind[target] == COMM), view.letters[target]
        source = _latest_input(view, target, done[not is_comm, letter])
        if source is not None:
            found[target] = [source]
            if not is_comm and letter is not None:
                done[True, letter].remove(source)  # the stream waits for it once
        for known in {letter, None}:
            done[is_comm, known].append(target)
    return found


def _latest_input(view: View, target: int, launched: Sequence[int]) -> int | None:
    is_comm = view.kind[target] == COMM
    if not view.may_wait[target] or (not is_comm and not view.waits_recorded and view.letters[target] is None):
        return None
    ended = [
        source for source in launched
        if view.end[source] <= view.start[target] + CLOCK and view.stream[source] != view.stream[target]
        and _may_need(view, source, target)
    ]  # fmt: skip
    if not ended:
        return None
    return ended[-1] if is_comm else max(ended, key=lambda source: view.end[source])
