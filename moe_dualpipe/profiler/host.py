"""A CPU as the device: what it computed, where it waited, and what was on its way meanwhile.

A CPU has no queue and no kernels; its trace holds nested operators, annotations, and the transfers of a backend, each
from its start to its end. From them follows work like a GPU's, so that everything else here need not know:

    computation     operators, and the rest of annotations that end in (F), (B), (I) or (W), such as attn(F), which is
                    Python between operators; without the moments in which they wait or talk to a backend
    communication   transfers, from their start to their end: gloo's, a modelled link's, or annotations of any name that
                    fits the pattern of communication; but not receives, which wait for a sender from when they are
                    posted: the send tells when something travels

Nested operators are one piece of work, named after the outermost of them inside the innermost such annotation.
"""

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from .chrome import Mark, Trace, Work

_COMPUTES = re.compile(r"\([FBIW]\)$")
_WAITS = re.compile(r"wait for |c10d::|_?c10d_functional::|link::")
_RECEIVES = re.compile(r":recv")
_ISSUES = re.compile(r"(?:c10d|link)::(\w+)")


def on_cpu(trace: Trace, pattern: re.Pattern[str]) -> Trace:
    """`trace` with its host as the device "cpu", if it has no work on any other; otherwise `trace` itself."""
    if trace.work or not (trace.operators or trace.transfers):
        return trace
    matching = [mark for mark in trace.annotations if pattern.search(mark.name)]
    sent = (mark for mark in trace.transfers if not _RECEIVES.search(mark.name))
    transfers = sorted([*sent, *matching], key=lambda mark: mark.start)
    annotations = [mark for mark in trace.annotations if not pattern.search(mark.name)]
    waits = [mark for mark in (*annotations, *trace.operators) if _WAITS.match(mark.name)]
    threads: dict[tuple[str, str], list[tuple[Mark, bool]]] = defaultdict(list)
    for mark in trace.operators:
        threads[mark.thread].append((mark, True))
    for mark in annotations:
        if _COMPUTES.search(mark.name) or _WAITS.match(mark.name):
            threads[mark.thread].append((mark, False))

    work: list[Work] = []
    launches: dict[int, Mark] = {}

    def add(mark: Mark, category: str, launch: Mark) -> None:
        launches[len(work)] = launch
        work.append(Work(mark.name, category, mark.start, mark.end, "cpu", mark.thread[1], len(work), 0))

    for marks in threads.values():
        for piece in _pieces(marks):
            add(piece, "operator", piece)
    free = 0.0
    for transfer, issue in zip(transfers, _issues(transfers, trace.operators), strict=True):
        if transfer.name.startswith("link:"):  # it is on its way before the thread that waits for it has woken up
            transfer = transfer._replace(start=min(transfer.start, max(issue.start, free)))
            free = transfer.end
        add(transfer, "transfer", issue)
    return replace(trace, work=work, launches=launches, annotations=annotations, waits=waits)


class _Open:
    """A mark that has begun and not ended, what its own time is called ("" where it waits), and whose piece that is."""

    __slots__ = ("called", "end", "operator", "owner", "thread")

    def __init__(self, mark: Mark, operator: bool, around: "_Open | None"):
        self.end = mark.end if around is None else min(mark.end, around.end)
        self.operator, self.thread = operator, mark.thread
        self.called = "" if _WAITS.match(mark.name) else mark.name if operator else "Python"
        self.owner = self
        if around is not None and (not around.called or (operator and self.called and around.operator)):
            self.called, self.owner = around.called, around.owner


def _pieces(marks: Iterable[tuple[Mark, bool]]) -> Iterator[Mark]:
    """Cut nested marks of one thread, each with whether it is an operator, into pieces that do not overlap."""
    stack: list[_Open] = []
    piece: Mark | None = None
    owner: _Open | None = None  # of the piece
    now = 0.0

    def until(time: float) -> Iterator[Mark]:
        """What passed from `now` to `time`, as the end of the last piece or as one of its own."""
        nonlocal piece, owner, now
        if stack and time > now:
            top = stack[-1]
            if piece is not None and piece.end == now and owner is top.owner:
                piece = piece._replace(end=time)
            else:
                if piece is not None:
                    yield piece
                piece, owner = Mark(top.called, now, time, top.thread) if top.called else None, top.owner
        now = max(now, time)

    for mark, operator in sorted(marks, key=lambda item: (item[0].start, -item[0].end)):
        while stack and stack[-1].end <= mark.start:
            yield from until(stack[-1].end)
            stack.pop()
        yield from until(mark.start)
        stack.append(_Open(mark, operator, stack[-1] if stack else None))
    while stack:
        yield from until(stack[-1].end)
        stack.pop()
    if piece is not None:
        yield piece


def _issues(transfers: Sequence[Mark], operators: Iterable[Mark]) -> Iterator[Mark]:
    """For each transfer, in order of their starts, the call that asked for it: they start in the order of the calls.

    c10d::alltoall_base_ asks for gloo:all_to_all. A transfer that nobody seems to have asked for stands for itself.
    """
    kinds = {_letters(transfer.name.rpartition(":")[2]) for transfer in transfers}
    asked: dict[str, deque[Mark]] = defaultdict(deque)
    for mark in sorted(operators, key=lambda mark: mark.start):
        if call := _ISSUES.match(mark.name):
            fitting = [kind for kind in kinds if _letters(call[1]).startswith(kind)]
            if fitting:
                asked[max(fitting, key=len)].append(mark)
    for transfer in transfers:
        waiting = asked[_letters(transfer.name.rpartition(":")[2])]
        yield waiting.popleft() if waiting and waiting[0].start <= transfer.start else transfer


def _letters(name: str) -> str:
    return re.sub("[^a-z]", "", name.lower())
