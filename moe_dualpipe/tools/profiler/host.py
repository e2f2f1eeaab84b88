"""Convert a trace without device events into one whose device is the CPU.

A CPU has neither a queue nor kernels. Its trace has nested operators, annotations, and the transfers of a backend. Here
they become device events, so that the other modules treat CPUs and GPUs alike:

    computation     operators. In annotations that end in (F), (B), (I) or (W), such as attn(F), also the Python code
                    between operators. Waits and calls of a backend are not computation. Operators inside "wait for x"
                    are computation: they unpack received data, and belong to phase x. A collective of
                    torch.distributed that blocks is a wait, although the trace shows only its call.
    communication   transfers of gloo, of a modeled link or through shared memory, from start to end, and annotations
                    that are named after communication. A send or receive of gloo is recorded for as long as it is
                    posted. Its payload moves while its call sends it, and, as far as a trace shows, while a thread
                    waits for it: this much is communication.

Nested operators become one event with the name of the outermost operator inside the innermost such annotation.
"""

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import inf

from ...overlap.labels import LINK_TRANSFER, LINK_WAIT, OWN_TRANSFERS, is_wait, letter_of, without_group, without_wait
from .communication import Names
from .phases import named
from .trace import WAKE_UP, Collective, DeviceEvent, HostEvent, Trace, running_at

_CALLS = re.compile(rf"c10d::|_?c10d_functional::|{OWN_TRANSFERS}::")
_LAUNCHES = re.compile(rf"(?:c10d|{OWN_TRANSFERS})::(\w+)")
_POSTED = re.compile(r"gloo:(?:send|recv)")
"""Transfers that are recorded from the moment they are posted to the end of the wait for them."""

_LEAST_BLOCKED = 1000.0
"""Microseconds. A shorter collective is not taken for a wait."""
_WAKE_UP_SHARE = 0.25
"""A blocked thread goes on within WAKE_UP after the transfer, or within this share of a longer wait."""


def as_device(trace: Trace, names: Names) -> Trace:
    """The trace with its device events named: their kinds, and what launched them. Without any, the CPU is a device."""
    trace = _host_as_device(trace, names)
    return replace(trace, device_events=named(trace, names))


def _host_as_device(trace: Trace, names: Names) -> Trace:
    """Return a trace whose device is "cpu" if `trace` has no device events, otherwise `trace` itself.

    Annotations with the name of a transfer, according to `names`, become transfers.
    """
    if trace.device_events or not (trace.operators or trace.transfers):
        return trace
    transfers, annotations = [*trace.transfers], list[HostEvent]()
    for event in trace.annotations:
        is_transfer = names.is_transfer(event.name) and not _waits(event.name)
        (transfers if is_transfer else annotations).append(event)
    transfers.sort(key=lambda event: event.start)
    calls = [*_launches_of(transfers, trace.operators)]
    groups = [without_group(event.name)[1] for event in transfers]
    transfers = [event._replace(name=without_group(event.name)[0]) for event in transfers]
    edges = _edges_of_threads([*trace.operators, *annotations], transfers)
    operators = [*trace.operators, *_blocking(transfers, calls, edges)]
    waits = [event for events in (annotations, operators) for event in events if _waits(event.name)]
    parts = [event for event in annotations if letter_of(event.name) or _waits(event.name)]
    # a thread of the backend only packs and unpacks
    packing = [
        transfer._replace(name=LINK_WAIT)
        for transfer, call in zip(transfers, calls, strict=True) if transfer.thread != call.thread
    ]  # fmt: skip
    threads: dict[tuple[str, str], tuple[list[HostEvent], list[HostEvent]]] = defaultdict(lambda: ([], []))
    for events, place in ((operators, 0), (parts, 1), (packing, 0)):
        for event in events:
            threads[event.thread][place].append(event)

    device_events: list[DeviceEvent] = []
    launches: dict[int, HostEvent] = {}

    def add(event: HostEvent, category: str, launch: HostEvent, collective: Collective | None = None) -> None:
        launches[correlation := len(device_events)] = launch
        place = "cpu", event.thread[1], correlation, 0, 0, collective
        device_events.append(DeviceEvent(event.name, category, event.start, event.end, *place))

    for events in threads.values():
        for piece in _pieces(*events):
            add(piece, "operator", piece)
    free: dict[tuple[str, str], float] = {}
    for transfer, launch, group in zip(transfers, calls, groups, strict=True):
        if _POSTED.match(transfer.name):
            for moving in _moving(transfer, launch, edges[launch.thread]):
                add(moving, "transfer", launch)
            continue
        if transfer.name == LINK_TRANSFER:  # the recorded start is too late: the link's thread wakes up first
            start = min(transfer.start, max(launch.start, free.get(transfer.thread, 0.0)))
            transfer = transfer._replace(start=start)
            free[transfer.thread] = transfer.end
        add(transfer, "transfer", launch, Collective("carry", group) if group else None)
    phases = [event._replace(name=without_wait(event.name)) for event in annotations]
    return replace(trace, device_events=device_events, launches=launches, annotations=phases, waits=waits)


@lru_cache(maxsize=1 << 16)
def _waits(name: str) -> bool:
    return is_wait(name) or _CALLS.match(name) is not None


def _pieces(operators: Sequence[HostEvent], parts: Sequence[HostEvent]) -> list[HostEvent]:
    """Cut nested events of one thread into pieces that do not overlap, sorted by time.

    parts: annotations. A moment belongs to the event that started last.
    """
    events, of_operators = [*operators, *parts], {*operators}
    edges = sorted({edge for event in events for edge in (event.start, event.end)})
    pieces: list[HostEvent] = []
    before: HostEvent | None = None
    for (start, end), running in zip(pairwise(edges), running_at(events, edges), strict=False):
        owner = _computing(running, of_operators)
        if owner is not None and owner is before:
            pieces[-1] = pieces[-1]._replace(end=end)
        elif owner is not None:
            pieces.append(HostEvent(owner.name if owner in of_operators else "Python", start, end, owner.thread))
        before = owner
    return pieces


def _computing(running: Iterable[HostEvent], operators: Collection[HostEvent]) -> HostEvent | None:
    """The event that computes, of nested events from the outermost on: an operator, or an annotation around Python."""
    found: HostEvent | None = None
    in_operator = False
    for event in running:
        operator = event in operators
        if _waits(event.name):
            if operator:
                return None  # nothing computes in a call of a backend
            found, in_operator = None, False
        elif not (operator and in_operator):
            found, in_operator = event, operator
    return found


def _launches_of(transfers: Sequence[HostEvent], operators: Iterable[HostEvent]) -> Iterator[HostEvent]:
    """Yield for each transfer the call that launched it, or the transfer itself if no call is found.

    transfers: sorted by start. Transfers of one kind start in the order of their calls. Names tell which calls launch a
    kind: c10d::alltoall_base_ launches gloo:all_to_all.
    """
    kinds = {transfer.name: _letters(transfer.name.rpartition(":")[2]) for transfer in transfers}
    calls = [event for event in operators if _waits(event.name) and _LAUNCHES.match(event.name)]
    launches: dict[str, deque[HostEvent]] = defaultdict(deque)
    for event in sorted(calls, key=lambda event: event.start):
        letters = _letters(event.name.rpartition(":")[2])
        if fitting := [kind for kind in kinds.values() if kind and letters.startswith(kind)]:
            launches[max(fitting, key=len)].append(event)
    for transfer in transfers:
        waiting = launches[kinds[transfer.name]]
        yield waiting.popleft() if waiting and waiting[0].start <= transfer.start else transfer


def _edges_of_threads(
    events: Iterable[HostEvent], transfers: Iterable[HostEvent]
) -> dict[tuple[str, str], list[float]]:  # fmt: skip
    """When each thread starts or ends something, sorted: its own events, and the ends of what it has posted."""
    edges: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        edges[event.thread] += event.start, event.end
    for transfer in transfers:
        if _POSTED.match(transfer.name):
            edges[transfer.thread].append(transfer.end)
    for times in edges.values():
        times.sort()
    return edges


def _moving(transfer: HostEvent, call: HostEvent, edges: Sequence[float]) -> Iterator[HostEvent]:
    """Yield when a posted transfer is known to move data: in the call that sends, and while its thread waits for it.

    edges: of the thread. It waits from the last thing it did before the transfer ends.
    """
    sends = call is not transfer and ":send" in transfer.name
    if sends:
        yield transfer._replace(start=call.start, end=call.end)
    since = max(transfer.start, edges[at - 1] if (at := bisect_left(edges, transfer.end)) else transfer.start)
    if not sends or transfer.end - since >= _LEAST_BLOCKED:
        yield transfer._replace(start=since)


def _blocking(
    transfers: Sequence[HostEvent], calls: Sequence[HostEvent], edges: Mapping[tuple[str, str], Sequence[float]]
) -> Iterator[HostEvent]:
    """Yield a wait for each collective of torch.distributed during which its thread did nothing.

    calls: the call of each transfer. edges: of all threads, in which the thread's next step is looked for.
    """
    for transfer, call in zip(transfers, calls, strict=True):
        waited = transfer.end - call.end
        if not call.name.startswith("c10d::") or waited < _LEAST_BLOCKED or _POSTED.match(transfer.name):
            continue
        times = edges[call.thread]
        following = times[at] if (at := bisect_right(times, call.end)) < len(times) else inf
        if 0 <= following - transfer.end <= max(WAKE_UP, _WAKE_UP_SHARE * waited):
            yield HostEvent(LINK_WAIT, call.end, following, call.thread)


def _letters(name: str) -> str:
    return re.sub("[^a-z]", "", name.lower())
