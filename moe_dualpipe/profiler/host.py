"""A CPU as the device: what it computed, where it waited, and what was on its way meanwhile.

A CPU has no queue and no kernels; its trace holds nested operators, annotations, and the transfers of a backend, each
from its start to its end. From them follows work like a GPU's, so that everything else here need not know:

    computation     operators, and the rest of annotations that end in (F), (B), (I) or (W), such as attn(F), which is
                    Python between operators; without the moments in which they wait or talk to a backend. Operators
                    inside of "wait for x" compute: they unpack what came, and belong to the phase x
    communication   transfers, from their start to their end: gloo's, a modelled link's, or annotations of any name that
                    fits the pattern of communication; but not receives, which wait for a sender from when they are
                    posted: the send tells when something travels

Nested operators are one piece of work, named after the outermost of them inside the innermost such annotation.
"""

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf

from ..overlap.labels import LINK, is_wait, letter_of, without_wait
from .trace import DeviceEvent, HostEvent, Trace

_CALLS = re.compile(rf"c10d::|_?c10d_functional::|{LINK}::")
_RECEIVES = re.compile(r":recv")
_ISSUES = re.compile(rf"(?:c10d|{LINK})::(\w+)")


def host_as_device(trace: Trace, pattern: re.Pattern[str]) -> Trace:
    """`trace` with its host as the device "cpu", if it has no work on any other; otherwise `trace` itself."""
    if trace.device_events or not (trace.operators or trace.transfers):
        return trace
    matching = {mark.name for mark in trace.annotations if pattern.search(mark.name) and not _waits(mark.name)}
    annotations = [mark for mark in trace.annotations if mark.name not in matching]
    transfers = [mark for mark in trace.transfers if not _RECEIVES.search(mark.name)]
    transfers += [mark for mark in trace.annotations if mark.name in matching]
    transfers.sort(key=lambda mark: mark.start)
    waits = [mark for marks in (annotations, trace.operators) for mark in marks if _waits(mark.name)]
    threads: dict[tuple[str, str], list[tuple[HostEvent, bool]]] = defaultdict(list)
    for mark in trace.operators:
        threads[mark.thread].append((mark, True))
    for mark in annotations:
        if is_phase(mark) or _waits(mark.name):
            threads[mark.thread].append((mark, False))

    work: list[DeviceEvent] = []
    launches: dict[int, HostEvent] = {}

    def add(mark: HostEvent, category: str, launch: HostEvent) -> None:
        launches[len(work)] = launch
        work.append(DeviceEvent(mark.name, category, mark.start, mark.end, "cpu", mark.thread[1], len(work), 0))

    for marks in threads.values():
        for piece in _pieces(marks):
            add(piece, "operator", piece)
    free = 0.0
    for transfer, issue in zip(transfers, _issues(transfers, trace.operators), strict=True):
        if transfer.name.startswith(f"{LINK}:"):  # it is on its way before the thread that waits for it has woken up
            transfer = transfer._replace(start=min(transfer.start, max(issue.start, free)))
            free = transfer.end
        add(transfer, "transfer", issue)
    phases = [mark._replace(name=phase_of_wait(mark)) for mark in annotations]
    return replace(trace, device_events=work, launches=launches, annotations=phases, waits=waits)


def is_phase(mark: HostEvent) -> bool:
    """Whether its name says that it is a part of a forward, a backward, an input or a weight gradient."""
    return letter_of(mark.name) is not None


def phase_of_wait(mark: HostEvent) -> str:
    """The phase to which what computes in it belongs: x for "wait for x", and for x itself."""
    return without_wait(mark.name)


@lru_cache(maxsize=1 << 16)
def _waits(name: str) -> bool:
    return is_wait(name) or _CALLS.match(name) is not None


class _Open:
    """A mark that has begun and not ended."""

    __slots__ = ("end", "operator", "outlasting", "owner", "shuts")

    def __init__(self, mark: HostEvent, operator: bool, around: "_Open | None"):
        self.end, self.operator = mark.end, operator
        self.outlasting: tuple[tuple[HostEvent, bool], ...] = ()
        """What began in it and ends after it, as coarse clocks tell."""
        if around is not None and mark.end > around.end:
            self.end = around.end
            around.outlasting += ((mark, operator),)
        called = "" if _waits(mark.name) else mark.name if operator else "Python"
        inside = around is not None and around.shuts
        self.shuts = inside or (operator and not called)
        """A call of a backend: nothing in it computes."""
        if around is not None and (inside or (operator and called and around.operator)):
            self.owner = around.owner
        else:
            self.owner = HostEvent(called, mark.start, mark.end, mark.thread)
        """Whose its own time is; without a name if that waits."""


def _pieces(marks: Iterable[tuple[HostEvent, bool]]) -> list[HostEvent]:
    """Cut marks of one thread, each with whether it is an operator, into pieces that do not overlap, in order.

    A moment belongs to the mark that began last of those around it.
    """
    pieces: list[HostEvent] = []
    stack: list[_Open] = []
    owner: HostEvent | None = None
    began = now = -inf

    def until(time: float) -> None:
        nonlocal owner, began, now
        if time > now:
            current = stack[-1].owner if stack else None
            if current is not owner:
                if owner is not None and owner.name:
                    pieces.append(HostEvent(owner.name, began, now, owner.thread))
                owner, began = current, now
            now = time

    def close() -> None:
        until(stack[-1].end)
        for mark, operator in stack.pop().outlasting:
            stack.append(_Open(mark, operator, stack[-1] if stack else None))

    for mark, operator in sorted(marks, key=lambda item: (item[0].start, -item[0].end)):
        while stack and stack[-1].end <= mark.start:
            close()
        until(mark.start)
        stack.append(_Open(mark, operator, stack[-1] if stack else None))
    while stack:
        close()
    until(inf)
    return pieces


def _issues(transfers: Sequence[HostEvent], operators: Iterable[HostEvent]) -> Iterator[HostEvent]:
    """For each transfer, in order of their starts, the call that asked for it: they start in the order of the calls.

    c10d::alltoall_base_ asks for gloo:all_to_all. A transfer that nobody seems to have asked for stands for itself.
    """
    kinds = {transfer.name: _letters(transfer.name.rpartition(":")[2]) for transfer in transfers}
    calls = [mark for mark in operators if _waits(mark.name) and _ISSUES.match(mark.name)]
    asked: dict[str, deque[HostEvent]] = defaultdict(deque)
    for mark in sorted(calls, key=lambda mark: mark.start):
        letters = _letters(mark.name.rpartition(":")[2])
        if fitting := [kind for kind in kinds.values() if kind and letters.startswith(kind)]:
            asked[max(fitting, key=len)].append(mark)
    for transfer in transfers:
        waiting = asked[kinds[transfer.name]]
        yield waiting.popleft() if waiting and waiting[0].start <= transfer.start else transfer


def _letters(name: str) -> str:
    return re.sub("[^a-z]", "", name.lower())
