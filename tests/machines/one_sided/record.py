"""Run the backend Symmetric on virtual ranks in Triton's interpreter, and record the events of its kernels.

The interpreter runs the programs of a kernel one after another. An order of the calls in which no kernel has to wait
shows all that kernels do when they have waited.
"""

import inspect
import linecache
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
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


def record(calls: list[Call]) -> Recording:
    """Make the calls on virtual ranks, each of them on all ranks before the next.

    Raises HazardError if a kernel waits for what none of the kernels before it does.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        eps = _build_ranks()
        recorder = _Recorder(monkeypatch, eps)
        _make_calls(eps, calls)
    return _recording(recorder)


def _build_ranks() -> list[OneSided]:
    """Backends that share the memory of all ranks."""
    sizes = {"max_tokens": TOKENS, "row_bytes": 4 * WIDTH, "top_k": EXPERTS, "num_sms": PROGRAMS, "slots": SLOTS}
    eps = [OneSided(EXPERTS, RANKS, rank, **sizes) for rank in range(RANKS)]
    memory = [torch.zeros(ep.memory_words, dtype=torch.int32) for ep in eps]
    for ep, own in zip(eps, memory, strict=True):
        ep._map(own, torch.tensor([each.data_ptr() for each in memory]))
    return eps


def _make_calls(eps: list[OneSided], calls: list[Call]) -> None:
    ids = torch.arange(EXPERTS).expand(TOKENS, EXPERTS)
    routes: list[dict[int, Any]] = [{} for _ in eps]
    pending: list[list[Any]] = [[] for _ in eps]
    for name, number, *with_weights in calls:
        for rank, ep in enumerate(eps):
            if name == "prepare":
                routes[rank][number] = ep.prepare(ids)
            elif name == "wait":
                pending[rank][number].wait()
            else:
                rows = TOKENS if name == "dispatch" else ep.capacity
                weights = torch.ones(rows, EXPERTS) if with_weights[0] else None
                pending[rank].append(getattr(ep, name)(torch.ones(rows, WIDTH), routes[rank][number], weights))


class _Recorder:
    """Patches the interpreter. launches: per rank, kernel, message and programs.

    An event has numbers of words: first those of the memory of all ranks, then those of their states.
    """

    def __init__(self, monkeypatch, eps: list[OneSided]):
        self.eps = eps
        self.launches: list[list[tuple[str, int, dict[int, list]]]] = [[] for _ in eps]
        self.events: list | None = None
        self.wanted: int | None = None
        tensors = [ep.own for ep in eps] + [ep.windows.state for ep in eps]
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

    def add(self, *event) -> None:
        if self.events is not None:
            self.events.append(event)

    # ---- what is patched ----

    def run(self, method, function, *args, **named):
        given = dict(zip(function.arg_names, args, strict=False))
        if "addresses" not in given:
            return method(function, *args, **named)
        launches = self.launches[given["rank"]]
        self.programs: dict[int, list] = {}
        launches.append((function.fn.__name__, given.get("number", launches and launches[-1][1]), self.programs))
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
                raise HazardError(f"nothing lets {_word_name(self.eps, word)} become {wanted}")
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


def _word_name(eps: list[OneSided], word: int) -> str:
    """Of the memory or the state of a rank (kernels/gpu/signals.py)."""
    name, size = "memory", len(eps[0].own)
    if word >= size * len(eps):
        name, size, word = "state", len(eps[0].windows.state), word - size * len(eps)
    return f"{name}[{word % size}] of rank {word // size}"


def _recording(recorder: _Recorder) -> Recording:
    """What was recorded, with numbers of words that several programs access. Raises HazardError for words that no order
    can protect."""
    eps, stored, writers = recorder.eps, set(), defaultdict(set)
    for rank, launches in enumerate(recorder.launches):
        for kind, event in (event for *_, programs in launches for events in programs.values() for event in events):
            if kind == "atomic":
                writers[event.word].update([rank] * event.exchange)
            elif kind == "store":
                stored.update(event.tolist())
    for word, ranks in writers.items():
        if word in stored:
            raise HazardError(f"{_word_name(eps, word)} is accessed with and without atomic operations")
        if len(ranks) > 1:
            raise HazardError(f"{_word_name(eps, word)} is written by ranks {sorted(ranks)}")
    cells, words = ({word: i for i, word in enumerate(sorted(each))} for each in (stored, writers))
    names = [[_word_name(eps, word) for word in each] for each in (cells, words)]
    memory = len(eps) * len(eps[0].own)
    ranks = [
        [
            Launch(kernel, message, tuple(_events(programs[i], cells, words) for i in range(len(programs))))
            for kernel, message, programs in launches
        ]
        for launches in recorder.launches
    ]
    return Recording(ranks, names[0], names[1], sum(word < memory for word in cells))


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
