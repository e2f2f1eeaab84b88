"""Run OneSided or Copies on virtual ranks in Triton's interpreter, and record what kernels, copies and streams do.

The interpreter runs the programs of a kernel one after another. An order of the calls in which no kernel has to wait
shows all that kernels do when they have waited. A copy is a kernel of one program. So are what a stream does to record
an event, which releases a word, and to wait for it.
"""

import inspect
import itertools
import linecache
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton._C.libtriton import ir
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

from moe_dualpipe.expert_parallel.symmetric.one_sided import OneSided
from tests.machines.interpreter import call_directly
from tests.machines.one_sided.events import Access, Atomic, Barrier, Event, HazardError, Launch, Recording

RANKS, EXPERTS, TOKENS, WIDTH = 2, 2, 2, 4  # each token is sent to both ranks
PROGRAMS, SLOTS = 2, 2  # of a kernel that copies; of a rank
KERNELS = "moe_dualpipe.kernels.gpu"
_SEM = {ir.MEM_SEMANTIC.ACQUIRE: "acquire", ir.MEM_SEMANTIC.RELEASE: "release", ir.MEM_SEMANTIC.RELAXED: "relaxed"}
_SCOPE = {ir.MEM_SYNC_SCOPE.CTA: "cta", ir.MEM_SYNC_SCOPE.GPU: "gpu", ir.MEM_SYNC_SCOPE.SYSTEM: "sys"}


Call = tuple[Any, ...]
"""("prepare", route), ("dispatch" or "combine", route, whether weights are sent too), or ("wait", transfer)."""
CALLS: list[Call] = [
    ("prepare", 0), ("prepare", 1), ("dispatch", 0, True), ("dispatch", 1, True), ("wait", 0), ("combine", 0, True),
    ("wait", 1), ("combine", 1, False), ("wait", 2), ("wait", 3),
]  # fmt: skip
"""A dispatch and a combine in each of two lanes, so that both slots are used twice."""


def record(calls: list[Call], backend: Callable[..., OneSided] = OneSided, on_streams: bool = False) -> Recording:
    """Make the calls on virtual ranks, each of them on all ranks before the next.

    Raises HazardError if a kernel waits for what none of the kernels before it does.
    """
    streams = Streams(RANKS)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if on_streams:
            monkeypatch.setattr("moe_dualpipe.overlap.streams.streams_of", lambda _device: streams)
        eps = virtual_ranks(backend)
        recorder = _Recorder(monkeypatch, eps, streams)
        with recorder:
            _make_calls(eps, calls, streams)
    return _recording(recorder)


def virtual_ranks(
    backend: Callable[..., OneSided], ranks: int = RANKS, experts: int = EXPERTS, **options: int
) -> list[Any]:
    """Backends that share the memory of all ranks."""
    sizes = {"max_tokens": TOKENS, "row_bytes": 4 * WIDTH, "top_k": EXPERTS, "num_sms": PROGRAMS, "slots": SLOTS}
    eps = [backend(experts, ranks, rank, **(sizes | options)) for rank in range(ranks)]
    memory = [torch.zeros(ep.memory_words, dtype=torch.int32) for ep in eps]
    for ep in eps:
        ep.connect(memory)
    return eps


class VirtualStream(NamedTuple):
    """A stream whose events are words, numbered down from -1. An event is the number that the word then has."""

    streams: "Streams"
    index: int

    def record_event(self) -> tuple[int, int]:
        event = self.index, next(self.streams.numbers)
        self._add("record", Atomic("an event", -1 - self.index, True, event[1], "release", "sys"))
        return event

    def wait_event(self, event: tuple[int, int]) -> None:
        index, number = event
        self._add(
            f"{'copies' if self.index >= self.streams.ranks else 'kernels'} wait",
            Atomic("an event", -1 - index, False, 0, "acquire", "sys", number),
        )

    def _add(self, name: str, event: Atomic) -> None:
        self.streams.launches[self.index].append((name, self.streams.message, {0: [("atomic", event)]}))


class Streams:
    """In place of torch.cuda. launches: kernel, message and programs, for each stream; one stream per rank is first."""

    def __init__(self, ranks: int):
        self.ranks, self.current, self.message, self.numbers = ranks, 0, 0, itertools.count(1)
        self.launches: list[list[tuple[str, int, dict[int, list]]]] = [[] for _ in range(ranks)]

    def Stream(self, _device: torch.device) -> VirtualStream:  # noqa: N802
        self.launches.append([])
        return VirtualStream(self, len(self.launches) - 1)

    def current_stream(self, _device: torch.device) -> VirtualStream:
        return VirtualStream(self, self.current)

    @contextmanager
    def stream(self, stream: VirtualStream):
        before, self.current = self.current, stream.index
        yield
        self.current = before

    def is_current_stream_capturing(self) -> bool:
        return False


def _make_calls(eps: list[OneSided], calls: list[Call], streams: Streams) -> None:
    ids = torch.arange(EXPERTS).expand(TOKENS, EXPERTS)
    routes: list[dict[int, Any]] = [{} for _ in eps]
    pending: list[list[Any]] = [[] for _ in eps]
    for name, number, *with_weights in calls:
        for rank, ep in enumerate(eps):
            streams.current = rank
            if name == "prepare":
                routes[rank][number] = ep.prepare(ids)
            elif name == "wait":
                pending[rank][number].wait()
            else:
                rows = TOKENS if name == "dispatch" else ep.capacity
                weights = torch.ones(rows, EXPERTS) if with_weights[0] else None
                pending[rank].append(getattr(ep, name)(torch.ones(rows, WIDTH), routes[rank][number], weights))


class _Recorder(TorchDispatchMode):
    """Patches the interpreter, and sees copies.

    An event has numbers of words: first those of the memory of all ranks, then those of staging memory, and of states.
    """

    def __init__(self, monkeypatch, eps: list[Any], streams: Streams):
        super().__init__()
        self.eps, self.streams, self.launches = eps, streams, streams.launches
        self.events: list | None = None
        self.wanted: int | None = None
        self.written: dict[int, int] = {}  # the last message of each word
        staging = [ep.transport.staging for ep in eps if hasattr(ep.transport, "staging")]
        self.messages = [*(ep.own for ep in eps), *staging]
        tensors = [*self.messages, *(ep.windows.state for ep in eps)]
        self.starts = np.cumsum([0, *map(len, tensors)])
        self.addresses = np.array([t.data_ptr() for t in tensors], dtype=np.uint64)
        call_directly(monkeypatch)
        for patched, name in (
            (InterpretedFunction, "run"), (InterpretedFunction, "__call__"), (InterpreterBuilder, "set_grid_idx"),
            (InterpreterBuilder, "create_masked_load"), (InterpreterBuilder, "create_masked_store"),
            (InterpreterBuilder, "create_atomic_rmw"), (InterpreterBuilder, "create_barrier"),
        ):  # fmt: skip
            method, ours = getattr(patched, name), getattr(self, name.strip("_"))
            monkeypatch.setattr(patched, name, lambda *args, m=method, ours=ours, **kw: ours(m, *args, **kw))

    def words(self, pointers, mask) -> np.ndarray:
        """The numbers of the words at the addresses where the mask is set; those of private tensors are left out."""
        mask = np.asarray(mask.data, dtype=bool)  # `&` makes integers of booleans
        bytes_from = np.broadcast_to(pointers.data, mask.shape)[mask].astype(np.uint64)[:, None] - self.addresses
        row, tensor = (bytes_from < 4 * np.diff(self.starts).astype(np.uint64)).nonzero()
        return self.starts[tensor] + (bytes_from[row, tensor] // 4).astype(int)

    def add(self, kind, event) -> None:
        if kind == "store":
            self.written |= dict.fromkeys(event.tolist(), self.streams.message)
        if self.events is not None:
            self.events.append((kind, event))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Record copies of messages and flags. What is left from earlier messages is copied too, but is not used."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default and all(isinstance(t, torch.Tensor) for t in args[:2]):
            targets, sources = (self.words_of(t) for t in args[:2])
            if len(targets) and len(sources):
                new = np.array([self.written.get(word) == self.streams.message for word in sources.tolist()])
                self.copy(targets[new], sources[new], args[1])
        return result

    def copy(self, targets: np.ndarray, sources: np.ndarray, source: torch.Tensor) -> None:
        events: list = [("load", sources)]
        if source.numel() > 1:
            events.append(("store", targets))
        else:
            events.append(("barrier", Barrier("a flag is read before it is written")))
            events += [
                ("atomic", Atomic("a flag is copied", word, True, int(source), "release", "sys"))
                for word in targets.tolist()
            ]
        name = "copy of a message" if source.numel() > 1 else "copy of a flag"
        self.launches[self.streams.current].append((name, self.streams.message, {0: events}))

    def words_of(self, t: torch.Tensor) -> np.ndarray:
        """The numbers of the words of a tensor in the memory or the staging memory of a rank; none for others."""
        last = self.starts[len(self.messages)]
        addresses = np.uint64(t.data_ptr()) + 4 * np.arange(t.numel(), dtype=np.uint64)
        words = self.words(SimpleNamespace(data=addresses), SimpleNamespace(data=np.ones(t.numel(), bool)))
        return words[words < last]

    # ---- what is patched ----

    def run(self, method, function, *args, **named):
        given = dict(zip(function.arg_names, args, strict=False))
        if "addresses" not in given:
            return method(function, *args, **named)
        self.streams.message = given.get("number", self.streams.message)
        self.programs: dict[int, list] = {}
        self.launches[self.streams.current].append((function.fn.__name__, self.streams.message, self.programs))
        try:
            method(function, *args, **named)
        except InterpreterError as error:
            raise error.__cause__ or error from None
        self.events = None
        return None

    def call(self, method, function, *args, **named):
        if function.fn.__name__ != "wait_for_all":
            return method(function, *args, **named)
        self.wanted = int(np.asarray(getattr(args[1], "handle", SimpleNamespace(data=args[1])).data).item())
        ok = method(function, *args, **named)
        self.wanted = None
        return ok

    def set_grid_idx(self, method, builder, x, y, z):
        self.events = self.programs.setdefault(x, [])
        return method(builder, x, y, z)

    def create_masked_load(self, method, builder, pointers, mask, *more):
        self.add("load", self.words(pointers, mask))
        return method(builder, pointers, mask, *more)

    def create_masked_store(self, method, builder, pointers, value, mask, *more):
        self.add("store", self.words(pointers, mask))
        return method(builder, pointers, value, mask, *more)

    def create_barrier(self, method, builder):
        self.add("barrier", Barrier(_line()))
        return method(builder)

    def create_atomic_rmw(self, method, builder, operation, pointers, value, mask, sem, scope):
        found = method(builder, operation, pointers, value, mask, sem, scope)
        inside = mask.data.astype(bool)
        operands, olds = (np.broadcast_to(each.data, inside.shape)[inside].tolist() for each in (value, found))
        for word, operand, old in zip(self.words(pointers, mask).tolist(), operands, olds, strict=True):
            wanted = self.wanted if word < self.starts[len(self.eps)] else None
            if wanted is not None and old < wanted:
                raise HazardError(f"nothing lets {_word_name(self, word)} become {wanted}")
            if self.starts[len(self.eps)] <= word < self.starts[len(self.messages)]:  # a flag to be copied
                self.add("store", np.array([word]))
                continue
            exchange = operation == ir.ATOMIC_OP.XCHG
            self.add("atomic", Atomic(_line(), word, exchange, operand, _SEM[sem], _SCOPE[scope], wanted))
        return found


def _line() -> str:
    """The line of a kernel that is being run, with the name of its function."""
    frame = inspect.currentframe()
    while frame and (not frame.f_globals["__name__"].startswith(KERNELS) or frame.f_code.co_name == "_acquire"):
        frame = frame.f_back
    assert frame is not None
    return f"{frame.f_code.co_name}: {linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()}"


# ---- from recorders to a recording ----


def _word_name(recorder: _Recorder, word: int) -> str:
    """Of the memory, the staging memory or the state of a rank (kernels/gpu/signals.py)."""
    if word < 0:
        return f"the events of stream {-1 - word}"
    i = int(np.searchsorted(recorder.starts, word, "right")) - 1
    ranks = len(recorder.eps)
    name = (
        ("memory", "staging", "state")[i // ranks]
        if len(recorder.messages) > ranks
        else ("memory", "state")[i // ranks]
    )
    return f"{name}[{word - recorder.starts[i]}] of rank {i % ranks}"


def _recording(recorder: _Recorder) -> Recording:
    """What was recorded, with numbers of words that several programs access. Raises HazardError for words that no order
    can protect."""
    ranks, stored, writers = len(recorder.eps), set(), defaultdict(set)
    for stream, launches in enumerate(recorder.launches):
        for kind, event in (event for *_, programs in launches for events in programs.values() for event in events):
            if kind == "atomic":
                writers[event.word].update([stream % ranks] * event.exchange)
            elif kind == "store":
                stored.update(event.tolist())
    for word, ranks in writers.items():
        if word in stored:
            raise HazardError(f"{_word_name(recorder, word)} is accessed with and without atomic operations")
        if len(ranks) > 1:
            raise HazardError(f"{_word_name(recorder, word)} is written by ranks {sorted(ranks)}")
    cells, words = ({word: i for i, word in enumerate(sorted(each))} for each in (stored, writers))
    names = [[_word_name(recorder, word) for word in each] for each in (cells, words)]
    memory = recorder.starts[len(recorder.messages)]
    launched = [
        [
            Launch(kernel, message, tuple(_events(programs[i], cells, words) for i in range(len(programs))))
            for kernel, message, programs in launches
        ]
        for launches in recorder.launches
    ]
    return Recording(launched, names[0], names[1], sum(word < memory for word in cells))


def _events(recorded: list, cells: dict[int, int], words: dict[int, int]) -> list[Event]:
    """The events of a program. Accesses to words that no program stores to are left out."""
    events: list[Event] = []
    for kind, event in recorded:
        if kind == "barrier":
            events.append(event)
        elif kind == "atomic":
            events.append(event._replace(word=words[event.word]))
        elif accessed := {cells[word] for word in event.tolist() if word in cells}:
            events.append(Access(kind == "store", tuple(sorted(accessed))))
    return events
