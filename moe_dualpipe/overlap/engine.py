"""The engine: interleaves two chunks in one fixed order, and runs their transfers on separate CUDA streams.

A lane runs one chunk's generator. The engine runs one lane until its next segment is a transfer, then the other lane;
deferred weight gradients run in between. For a forward F and a backward B of Mixture-of-Experts layers this gives the
order of DeepSeek's published training trace, layer by layer:

    combine(B) | attn(F), mlp(B), dispatch(F), dispatch(B), mlp(W), mlp(F), attn(B), attn(W), combine(F), combine(B) |

On a GPU, this is the order in which the host queues the work (`queued`). Each transfer waits on the GPU until its input
is computed. If a dispatch must read sizes on the host, mlp(B) is already in the queue. On a CPU, a call returns when
its work is done. So a transfer starts as soon as its input exists, and then the other lane runs. If a transfer is
complete at once, there is nothing to hide, and its lane continues. Both devices run computations in the same
order, and transfers in the same order.

With keys gathered before attention (models/context_parallel.py), a layer has three transfers. By the same rule,

    combine(B) | qkv(W), attn(F), mlp(B), dispatch(F), dispatch(B), mlp(W), mlp(F), attn(B), combine(F), keys(B),
    attn(W), qkv(F), qkv(B), keys(F), combine(B) |

The forward begins with two transfers (`Comm.opens`), so that the rest is the order above. Keys run behind qkv, which is
short. If they take longer, the forward begins after the first transfer of the backward, and attention hides keys:

    dispatch(B) | mlp(W), qkv(F), attn(B), keys(F), keys(B), attn(W), attn(F), qkv(B), dispatch(F), combine(B), qkv(W),
    mlp(F), mlp(B), combine(F), dispatch(B) |

With `WeightGrads.late`, mlp(W) runs after mlp(F), so that combine(F) starts earlier. This is faster where attention is
short, or combine is long.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from ..errors import LayerError, in_context, user_line
from ..kernels.weight_grads import WeightGrads
from ..messages import quoted
from . import streams
from .annotation import annotation
from .labels import PREPARE, WAIT_FOR, WEIGHTS, in_words, label
from .segment import Comm, CommResult, Compute, PrepareComm, Segments, Tensors, Weights
from .waits import waits_for_ranks


class Engine:
    """Runs chunks on a device.

    queued: whether the host queues work for the device; by default, True on CUDA. log: receives the labels of the
    segments, in the order in which they ran. running: label and layer of the current segment. started: the number of
    segments started so far. Another thread may read both (health/heartbeat.py).
    """

    def __init__(self, device: torch.device, queued: bool | None = None, log: list[str] | None = None):
        device_streams = streams.streams_of(device)
        self.queued = device_streams is not None if queued is None else queued
        self.sides = _SideStream.pair(device, device_streams) if device_streams else (None, None)
        self.log = log
        self.running: tuple[str, int | None] | None = None
        self.started = 0

    def run(self, segments: Segments, kind: str) -> Any:
        """Run one chunk alone and return its result."""
        lane = Lane(self, segments, kind)
        while lane.active:
            lane.advance()
            lane.launch()
        return lane.result

    def interleave(self, first: "Lane", second: "Lane") -> None:
        """Run two chunks, each hiding the other's communication. Only `second` may defer weight gradients."""
        # Two streams: one chunk's rows are packed while the other's are in transfer.
        first.side, second.side = self.sides
        first.interleaved = second.interleaved = True
        late = second.weight_grads is not None and second.weight_grads.late
        try:
            opens = 0
            while second.active and not opens:
                second.advance()
                second.launch()
                second.run_deferred()
                opens = second.opens
            for _ in range(opens - 1):
                first.advance()
                first.launch()
            while first.active or second.active:
                first.advance()
                if late:
                    second.run_deferred()
                second.advance()
                waiting = [lane.next_comm for lane in (first, second) if lane.next_comm is not None]
                if waiting and not any(comm.hide for comm in waiting):
                    second.run_deferred()
                first.launch()
                second.launch()
                if not (late and first.hide):
                    second.run_deferred()
        except BaseException:
            second.drop_deferred()
            raise

    def annotate(self, text: str, layer: int | None, log: bool = True, source: Any = None) -> "_Annotated":
        """Name what runs in this context, for profilers, the log and errors. source: see `Compute`."""
        if log and self.log is not None:
            self.log.append(text)
        return _Annotated(self, text, layer, source)


class _Annotated:
    """The context of `Engine.annotate`. A class takes half as long as a function with `contextmanager`."""

    __slots__ = ("engine", "layer", "outer", "range", "source", "text")

    def __init__(self, engine: Engine, text: str, layer: int | None, source: Any):
        self.engine, self.text, self.layer, self.source = engine, text, layer, source

    def __enter__(self) -> None:
        engine = self.engine
        self.outer, engine.running = engine.running, (self.text, self.layer)
        engine.started += 1
        self.range = annotation(self.text)
        self.range.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: Any) -> None:
        self.range.__exit__(kind, error, frames)
        self.engine.running = self.outer
        if isinstance(error, Exception | SystemExit):
            self._explain(error)

    def _explain(self, error: Exception | SystemExit) -> None:
        """Note where `error` happened. Raises LayerError for a SystemExit: code 0 would be a complete run."""
        where = ("" if self.layer is None else f"layer {self.layer}, ") + in_words(self.text)
        if not isinstance(error, SystemExit):
            in_context(error, where, self.source)
            return
        failure = LayerError(f"a layer called sys.exit({quoted(error.code)})", user_line(error))
        in_context(failure, where)
        raise failure from error


class Lane:
    """Runs one chunk. `kind` is F or B. With `weight_grads`, weight gradients are deferred until `run_deferred`."""

    def __init__(self, engine: Engine, segments: Segments, kind: str, weight_grads: WeightGrads | None = None):
        self.engine, self.kind, self.weight_grads = engine, kind, weight_grads
        self.side, self.interleaved = engine.sides[0], False
        self.segments, self.active = segments, True
        self.next_comm: Comm | None = None
        self.hide, self.opens = "", 1
        """Those of the last transfer that was started."""
        self.result: Any = None
        self._reply: Any = None
        self._inputs_ready: Any = None
        self._deferred: list[Weights] = []

    def advance(self) -> None:
        """Run segments until the next one is a transfer. Unless `queued`, start it; if it is complete, continue."""
        while self.active and self.next_comm is None:
            try:
                segment = self.segments.send(self._reply)
            except StopIteration as stop:
                self.result, self.active, self._reply = stop.value, False, None
                return
            side = self.side
            match segment:
                case Compute():
                    text, layer, source = label(segment.name, self.kind), segment.layer, segment.source
                    with self.engine.annotate(text, layer, source=source):
                        self._reply = segment.fn() if self.weight_grads is None else self._defer(segment)
                case PrepareComm():
                    run = partial(segment.fn, *segment.inputs)
                    with self.engine.annotate(PREPARE + label(segment.name, self.kind), segment.layer, log=False):
                        self._reply = side.prepare(segment, run) if side else run()
                case Comm():
                    self.next_comm, self._reply = segment, None
                    self._inputs_ready = side.mark() if side else None
                    if not self.engine.queued:
                        if not self.launch():
                            return
                        self.run_deferred()

    def launch(self) -> bool:
        """Start the next transfer, if there is one. Returns whether it is already complete."""
        if self.next_comm is None:
            return False
        comm, side, self.next_comm = self.next_comm, self.side, None
        self.hide, self.opens = comm.hide, comm.opens
        with self.engine.annotate(text := label(comm.name, self.kind), comm.layer):
            transfer = side.start(comm, self._inputs_ready, self.interleaved) if side else comm.fn()
        self._reply = CommResult(partial(self._wait, transfer, WAIT_FOR + text, comm.layer))
        return getattr(transfer, "completed", False)

    def run_deferred(self) -> None:
        for segment in self._deferred:
            with self.engine.annotate(label(segment.name, WEIGHTS), segment.layer):
                segment.fn()
        self._deferred.clear()

    def drop_deferred(self) -> None:
        for segment in self._deferred:
            segment.drop()

    def _defer(self, segment: Compute) -> Any:
        """Run `segment`, and defer its weight gradients."""
        weight_grads, key = self.weight_grads, object()
        assert weight_grads is not None
        with weight_grads.defer_to(key):
            reply = segment.fn()
        if weight_grads.has_deferred(key):
            self._deferred.append(Weights(segment, weight_grads, key))
        else:
            weight_grads.run_deferred(key)
        return reply

    @waits_for_ranks  # also for the transfers of custom backends
    def _wait(self, transfer: Any, text: str, layer: int | None) -> Tensors:
        with self.engine.annotate(text, layer, log=False):
            return transfer.wait()


_Mark = tuple[Any, list[object]]


class _SideStream:
    """The CUDA stream for the communication of one lane. It also holds memory until all streams have used it.

    A result is allocated on this stream and read on the compute stream. When its last reference is dropped, the
    allocator may reuse the memory for the next transfer before the compute stream has read it. So this object holds an
    extra reference. It is dropped when this stream has waited for an event of the compute stream that was recorded
    after all other references were dropped.

    The functions of a transfer also hold memory, such as the indices of a route. The forward allocates it on one side
    stream, and the backward may use it on the other, `peer`.
    """

    def __init__(self, device: torch.device, streams: Any):
        self.streams, self.stream = streams, streams.Stream(device, priority=-1)
        self.held: list[object] = []
        self.prepared: list[PrepareComm] = []
        self.peer: _SideStream = self

    @staticmethod
    def pair(device: torch.device, streams: Any) -> "tuple[_SideStream, _SideStream]":
        one, other = _SideStream(device, streams), _SideStream(device, streams)
        one.peer, other.peer = other, one
        return one, other

    def mark(self) -> _Mark:
        """Record an event on the compute stream. Returns it, and the objects that may be released after it."""
        free = [held for held in self.held if not _is_used(held)]
        return self.streams.current_stream(self.stream.device).record_event(), free

    def run(self, fn: Any, mark: _Mark) -> tuple[Any, Any]:
        """Run `fn` on this stream after `mark`. Returns its result, and an event recorded after it."""
        with self.streams.stream(self.stream):
            self.stream.wait_event(mark[0])
            self.held = [held for held in self.held if all(held is not other for other in mark[1])]
            mark[1].clear()
            return fn(), self.stream.record_event()

    def prepare(self, segment: PrepareComm, run: Callable[[], Any]) -> Any:
        self.prepared.append(segment)
        return self.run(run, self.mark())[0]

    def start(self, comm: Comm, mark: _Mark, interleaved: bool) -> "_SideStreamTransfer":
        value, done = self.run(lambda: comm.fn().wait(), mark)
        self.held += [t.untyped_storage() for t in value if t is not None]
        prepared, self.prepared = self.prepared, []
        return _SideStreamTransfer(value, done, comm, prepared, self, interleaved)


def _is_used(held: object) -> bool:
    """Whether a held storage has other references. Functions are held only after their last use, so: False."""
    return isinstance(held, torch.UntypedStorage) and torch._C._storage_Use_Count(held._cdata) > 1


@dataclass(frozen=True, slots=True)
class _SideStreamTransfer:
    """A transfer on the side stream. `comm` and `prepared` keep the inputs alive while the stream reads them."""

    value: Tensors
    done: Any
    comm: Comm
    prepared: list[PrepareComm]
    side: _SideStream
    interleaved: bool

    def wait(self) -> Tensors:
        self.side.streams.current_stream(self.done.device).wait_event(self.done)
        if self.interleaved:  # otherwise the peer is idle, and its next mark will be later than `done`
            self.side.peer.held.append((self.comm.collective,))
        return self.value


engine_for = lru_cache(Engine)  # the engine of this process for a device
