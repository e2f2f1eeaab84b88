"""The engine: interleaves two chunks in one fixed order, and is the only place with CUDA streams and events.

A lane is one chunk's coroutine. The rule is: run one lane until it asks for a transfer, then the other; weight
gradients fill in. For a forward F and a backward B of Mixture-of-Experts layers that gives the order of DeepSeek's
published training trace, layer by layer:

    combine(B) | attn(F), mlp(B), dispatch(F), dispatch(B), mlp(W), mlp(F), attn(B), attn(W), combine(F), combine(B) |

That is the order in which a device is queued for (`queued`): the transfers there wait for events, not for their place
in the queue, and where a dispatch must read sizes on the host, mlp(B) is queued already. On a CPU work is done when its
call returns, so a transfer starts as soon as its data is there, and only then does the other lane go on; one that is
there at once hides nothing, and its lane stays on. Otherwise the order within compute, and within communication, is the
same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch.profiler import record_function

from ..kernels.weight_grads import WeightGrads
from .labels import WEIGHTS, label, prepare, wait_for
from .segment import Comm, CommResult, Compute, PrepareComm, Segments, Tensors


class Engine:
    """Runs lanes on a device. `queued`: see above, by default True on CUDA. `log` collects what was run, in order."""

    def __init__(self, device: torch.device, queued: bool | None = None, log: list[str] | None = None):
        self.queued = device.type == "cuda" if queued is None else queued
        self.side = _SideStream(device) if device.type == "cuda" else None
        self.log = log

    def run(self, segments: Segments, kind: str) -> Any:
        """Run one chunk alone and return what it returns."""
        lane = Lane(self, segments, kind)
        while lane.active:
            lane.advance()
            lane.launch()
        return lane.result

    def interleave(self, first: "Lane", second: "Lane") -> None:
        """Run two chunks, a forward and a backward or two forwards, each hiding the other's communication."""
        try:
            second.advance()
            second.launch()
            second.run_deferred()
            while first.active or second.active:
                first.advance()
                second.advance()
                next_comm = first.next_comm or second.next_comm
                if next_comm is not None and next_comm.weights_first:
                    second.run_deferred()
                first.launch()
                second.launch()
                second.run_deferred()
        except BaseException:
            first.drop_deferred()
            second.drop_deferred()
            raise

    @contextmanager
    def annotate(self, text: str, layer: int | None, log: bool = True) -> Iterator[None]:
        """Name a piece of work: for profilers, the log, and whoever reads the traceback."""
        if log and self.log is not None:
            self.log.append(text)
        try:
            with record_function(text):
                yield
        except Exception as error:
            error.add_note(f"during {text}" + ("" if layer is None else f" of layer {layer}"))
            raise


class Lane:
    """Runs one chunk. `kind` is F or B. With `weight_grads`, weight gradients are deferred until `run_deferred`."""

    def __init__(self, engine: Engine, segments: Segments, kind: str, weight_grads: WeightGrads | None = None):
        self.engine, self.kind, self.weight_grads = engine, kind, weight_grads
        self.segments, self.active = segments, True
        self.next_comm: Comm | None = None
        self.result: Any = None
        self._reply: Any = None
        self._inputs_ready: Any = None
        self._deferred: list[tuple[Compute, object]] = []

    def advance(self) -> None:
        """Compute until a transfer is asked for (queued) or on its way (not queued), or to the end."""
        while self.active and self.next_comm is None:
            try:
                segment = self.segments.send(self._reply)
            except StopIteration as stop:
                self.result, self.active, self._reply = stop.value, False, None
                return
            side = self.engine.side
            match segment:
                case Compute():
                    self._reply = self._compute(segment)
                case PrepareComm():
                    run = partial(segment.fn, *segment.inputs)
                    with self.engine.annotate(prepare(label(segment.name, self.kind)), segment.layer, log=False):
                        self._reply = side.run(run, side.mark())[0] if side else run()
                case Comm():
                    self.next_comm, self._reply = segment, None
                    self._inputs_ready = side.mark() if side else None
                    if not self.engine.queued:
                        if not self.launch():
                            return
                        self.run_deferred()

    def launch(self) -> bool:
        """Start the transfer that was asked for, if one was. Returns whether there is nothing to hide: it is there."""
        if self.next_comm is None:
            return False
        comm, side, self.next_comm = self.next_comm, self.engine.side, None
        with self.engine.annotate(text := label(comm.name, self.kind), comm.layer):
            pending = side.start(comm, self._inputs_ready) if side else comm.fn()
        self._reply = CommResult(partial(self._wait, pending, wait_for(text), comm.layer))
        return getattr(pending, "completed", False)

    def run_deferred(self) -> None:
        """Compute the weight gradients that were put off."""
        for segment, key in self._deferred:
            with self.engine.annotate(label(segment.name, WEIGHTS), segment.layer):
                assert self.weight_grads is not None
                self.weight_grads.run_deferred(key)
        self._deferred.clear()

    def drop_deferred(self) -> None:
        """After a failure: nothing is owed."""
        for _, key in self._deferred:
            assert self.weight_grads is not None
            self.weight_grads.drop(key)

    def _compute(self, segment: Compute) -> Any:
        with self.engine.annotate(label(segment.name, self.kind), segment.layer):
            if self.weight_grads is None:
                return segment.fn()
            key = object()
            with self.weight_grads.defer_to(key):
                answer = segment.fn()
        if self.weight_grads.has_deferred(key):
            self._deferred.append((segment, key))
        else:
            self.weight_grads.run_deferred(key)
        return answer

    def _wait(self, pending: Any, text: str, layer: int | None) -> Tensors:
        with self.engine.annotate(text, layer, log=False):
            return pending.wait()


class _SideStream:
    """Where communication is queued on CUDA, and who keeps its memory.

    What a transfer brings is allocated for this stream, so the allocator would give it to the next transfer as soon as
    the last reference is gone, while work that reads it may still be queued. So each is held here as well, until an
    event that came after everybody else let go of it has been waited for.
    """

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.held: list[torch.UntypedStorage] = []

    def mark(self) -> tuple[Any, list[torch.UntypedStorage]]:
        """This point of the compute stream, and the memory that nobody will use beyond it."""
        free = [s for s in self.held if torch._C._storage_Use_Count(s._cdata) == 1]
        return torch.cuda.current_stream(self.stream.device).record_event(), free

    def run(self, fn: Any, mark: tuple[Any, list[torch.UntypedStorage]]) -> tuple[Any, Any]:
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(mark[0])
            self.held = [s for s in self.held if all(s is not other for other in mark[1])]
            mark[1].clear()
            return fn(), self.stream.record_event()

    def start(self, comm: Comm, mark: Any) -> "_Queued":
        value, done = self.run(lambda: comm.fn().wait(), mark)
        self.held += [t.untyped_storage() for t in value if t is not None]
        return _Queued(value, done, comm)


@dataclass(frozen=True, slots=True)
class _Queued:
    """A transfer on the side stream, with the Comm and so its inputs, which it is still reading."""

    value: Tensors
    done: Any
    comm: Comm

    def wait(self) -> Tensors:
        torch.cuda.current_stream(self.done.device).wait_event(self.done)
        return self.value


@lru_cache
def engine_for(device: torch.device) -> Engine:
    """The engine of this process for `device`."""
    return Engine(device)
