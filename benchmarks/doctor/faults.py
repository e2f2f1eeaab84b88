"""A pair of chunks with faults, whose segments and transfers take known times.

The engine, the layers and the recording are real. The model is tiny, and each segment sleeps, so that other programs on
the machine hardly change its time. Transfers are those of modeled links, which sleep as well.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from moe_dualpipe.expert_parallel import Link, Loopback
from moe_dualpipe.expert_parallel.exchange import AsyncResult
from moe_dualpipe.expert_parallel.modeled.link import LinkTimer
from moe_dualpipe.expert_parallel.protocol import Combined, Pending, Received, Route
from moe_dualpipe.overlap import Engine
from moe_dualpipe.overlap.labels import BACKWARD, FORWARD, LINK_CALL, SHARED, WEIGHTS, label, with_group
from moe_dualpipe.tools.profiler.capture import capture
from moe_dualpipe.tools.profiler.pair import Pair, Workload

RANKS = 8
LAYERS = 4
SECONDS = {
    label(name, kind): seconds
    for kind, seconds in ((FORWARD, 0.03), (BACKWARD, 0.03), (WEIGHTS, 0.01)) for name in ("attn", "mlp")
}  # fmt: skip
"""What each segment sleeps."""
TRANSFER, LONG_TRANSFER = 0.04, 0.08
"""Seconds of a transfer; the long ones take more time than there is computation beside them."""

Hook = Callable[[str], None]


def workload() -> Workload:
    return Workload.from_preset("train", "tiny", LAYERS, 16, 16)


def overlapped(pair: Pair, engine: Engine) -> None:
    """Run the chunks of a prepared pair interleaved, on `engine`."""
    backward, forward = pair._chunks
    stage = pair.stage
    stage.overlapped_forward_backward(stage, forward, None, None, stage, None, *backward, engine=engine)


class PacedEngine(Engine):
    """An engine whose segments sleep. inside, after: called with the label of each segment, in it and after it."""

    def __init__(self, queued: bool = False, inside: Sequence[Hook] = (), after: Sequence[Hook] = ()):
        super().__init__(torch.device("cpu"), queued)
        self.inside, self.after = inside, after

    @contextmanager
    def annotate(self, text: str, layer: int | None, log: bool = True, source: Any = None) -> Iterator[None]:  # type: ignore[override]
        with super().annotate(text, layer, log, source):
            yield
            if text in SECONDS:
                time.sleep(SECONDS[text])
                for hook in self.inside:
                    hook(text)
        if text in SECONDS:
            for hook in self.after:
                hook(text)


# ---- Links ----


class GatedTimer(LinkTimer):
    """A link behind a busy hardware queue: a transfer starts when two more segments have ended, or something waits."""

    def __init__(self) -> None:
        super().__init__()
        self._gates: list[tuple[threading.Event, threading.Event]] = []

    def segment_ended(self, _text: str) -> None:
        for first, second in self._gates:
            (second if first.is_set() else first).set()
        self._gates = [gate for gate in self._gates if not gate[1].is_set()]

    def transfer(self, seconds: float, group: str = "") -> AsyncResult[None]:
        if self._thread is None:
            super().transfer(0.0).wait()
        assert self._thread is not None
        first, second = threading.Event(), threading.Event()
        self._gates.append((first, second))
        with record_function(with_group(LINK_CALL, group)):
            done = self._thread.submit(self._run, second, seconds, group)

        def wait() -> None:
            second.set()
            done.result()

        return AsyncResult([], wait)

    @staticmethod
    def _run(gate: threading.Event, seconds: float, group: str) -> None:
        gate.wait()
        with record_function(
            with_group(f"{SHARED}:carry", group)
        ):  # of a modeled link, the profiler would correct the start
            time.sleep(seconds)


class Links(Loopback):
    """The transfers of the forward and of the backward are in a group of ranks each.

    timers: the link of the forward, and that of the backward; both may be one. waits: a dispatch of the forward waits
    at once. slow_every: one of so many transfers takes four times as long; 0: none.
    """

    def __init__(self, timers: Sequence[LinkTimer], waits: bool, slow_every: int):
        super().__init__(workload().model.num_experts, RANKS)
        self.timers, self.waits, self.slow_every = timers, waits, slow_every
        self.backward, self.transfers = False, 0

    def dispatch(self, x_TD: Tensor, route: Route, weights_TK: Tensor | None = None) -> Pending[Received]:
        self.backward = weights_TK is None  # the backward of a combine is a dispatch without weights
        pending = super().dispatch(x_TD, route, weights_TK)
        if self.waits and weights_TK is not None:
            pending.wait()
        return pending

    def combine(self, y_ND: Tensor, route: Route, weight_grads_NK: Tensor | None = None) -> Pending[Combined]:
        self.backward = weight_grads_NK is not None
        return super().combine(y_ND, route, weight_grads_NK)

    def _transfer(self, rows: Tensor, num_bytes: int) -> Pending[Tensor]:
        if not num_bytes:  # sizes take no time
            return AsyncResult([], lambda: rows)
        seconds = self.link.seconds(num_bytes)
        self.transfers += 1
        if self.slow_every and self.transfers % self.slow_every == 0:
            seconds *= 4
        group = "experts of the backward" if self.backward else "experts of the forward"
        return AsyncResult([self.timers[self.backward].transfer(seconds, group)], lambda: rows)


class Metric:
    """A number that mlp(B) sums over all ranks, for a log. reads: it is read at once, otherwise after the run."""

    def __init__(self, reads: bool):
        self.reads, self.timer = reads, LinkTimer()
        self.pending: list[AsyncResult[None]] = []

    def __call__(self, text: str) -> None:
        if text != label("mlp", BACKWARD):
            return
        total = self.timer.transfer(TRANSFER, "world")
        if self.reads:
            total.wait()
            torch.zeros(()).item()
        self.pending.append(total)

    def read(self) -> None:
        for total in self.pending:
            total.wait()
        self.pending.clear()


# ---- Runs ----

WAIT, READ, LATE, QUEUE, SHARED_LINK, SLOW = (
    "wait at once", "number read at once", "late launch", "busy queue", "shared link", "slow transfers",
)  # fmt: skip
FAULTS = {
    WAIT: "host-sync",
    READ: "host-sync",
    LATE: "late-launch",
    QUEUE: "few-queues",
    SHARED_LINK: "shared-stream",
    SLOW: "imbalance",  # the recording of one rank cannot tell it from a late rank
}
"""The verdict that must name each fault."""


class Run:
    """A pair with `faults`. related: the faults of the runs that it is compared with; links and transfers are alike."""

    def __init__(self, faults: Collection[str], related: Collection[str] = ()):
        related = {*faults, *related}
        timers = [GatedTimer() if QUEUE in faults else LinkTimer() for _ in range(2)]
        if SHARED_LINK in faults:
            timers[1] = timers[0]
        self.link = Link(latency_us=1e6 * (LONG_TRANSFER if SHARED_LINK in related else TRANSFER))
        self.links = Links(timers, WAIT in faults, 5 if SLOW in faults else 0)
        self.pair = Pair(workload(), self.links)
        self.metric = Metric(READ in faults)
        inside = [self.metric] if READ in related else []
        after = [timer.segment_ended for timer in timers if isinstance(timer, GatedTimer)]
        self.engine = PacedEngine(LATE in faults, inside, after)

    def record(self, path: Path) -> None:
        """Record one run."""
        self.links.link = Link()  # nothing is overlapped while the run is prepared
        self.pair.prepare()
        self.links.link = self.link
        with capture(path, torch.device("cpu")):
            overlapped(self.pair, self.engine)
            self.metric.read()
