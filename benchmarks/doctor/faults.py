"""A pair of chunks with faults, whose segments and transfers take known times.

The engine, the layers and the recording are real. The model is tiny, and each segment sleeps, so that other programs on
the machine hardly change its time. Transfers are those of modeled links, which sleep as well.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_dualpipe.expert_parallel import Link, Loopback
from moe_dualpipe.expert_parallel.exchange import AsyncResult
from moe_dualpipe.expert_parallel.modeled.link import LinkTimer
from moe_dualpipe.expert_parallel.protocol import Combined, Pending, Received, Route
from moe_dualpipe.overlap import Engine
from moe_dualpipe.overlap.labels import BACKWARD, FORWARD, WEIGHTS, label
from moe_dualpipe.tools.profiler.capture import capture
from moe_dualpipe.tools.profiler.pair import Pair, PairWorkload

RANKS = 8
LAYERS = 4
SECONDS = {
    label(name, kind): seconds
    for kind, seconds in ((FORWARD, 0.03), (BACKWARD, 0.03), (WEIGHTS, 0.01)) for name in ("attn", "mlp")
}  # fmt: skip
"""What each segment sleeps."""
TRANSFER = 0.04
"""Seconds of a transfer."""

Hook = Callable[[str], None]


def workload() -> PairWorkload:
    return PairWorkload.from_preset("train", "tiny", LAYERS, 16, 16)


def overlapped(pair: Pair, engine: Engine) -> None:
    """Run the chunks of a prepared pair interleaved, on `engine`."""
    backward, forward = pair._chunks
    stage = pair.stage
    stage.overlapped_forward_backward(stage, forward, None, None, stage, None, *backward, engine=engine)


class PacedEngine(Engine):
    """An engine whose segments sleep. inside: called with the label of each segment, in it."""

    def __init__(self, inside: Sequence[Hook] = ()):
        super().__init__(torch.device("cpu"))
        self.inside = inside

    @contextmanager
    def annotate(self, text: str, layer: int | None, log: bool = True, source: Any = None) -> Iterator[None]:  # type: ignore[override]
        with super().annotate(text, layer, log, source):
            yield
            if text in SECONDS:
                time.sleep(SECONDS[text])
                for hook in self.inside:
                    hook(text)


# ---- Links ----


class Links(Loopback):
    """The transfers of the forward and of the backward are in a group of ranks each.

    timers: the link of the forward, and that of the backward. waits: a dispatch of the forward waits
    at once. slow_every: one in this many transfers takes four times as long; 0: none.
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

WAIT, READ, SLOW = "wait at once", "number read at once", "slow transfers"
FAULTS = {
    WAIT: "host-sync",
    READ: "host-sync",
    SLOW: "imbalance",  # the recording of one rank cannot tell it from a late rank
}
"""The cause that must name each fault."""


class Run:
    """A pair with `faults`. related: the faults of the runs that it is compared with; links and transfers are alike."""

    def __init__(self, faults: Collection[str], related: Collection[str] = ()):
        related = {*faults, *related}
        timers = [LinkTimer() for _ in range(2)]
        self.link = Link(latency_us=1e6 * TRANSFER)
        self.links = Links(timers, WAIT in faults, 5 if SLOW in faults else 0)
        self.pair = Pair(workload(), self.links)
        self.metric = Metric(READ in faults)
        inside = [self.metric] if READ in related else []
        self.engine = PacedEngine(inside)

    def record(self, path: Path) -> None:
        """Record one run."""
        self.links.link = Link()  # nothing is overlapped while the run is prepared
        self.pair.prepare()
        self.links.link = self.link
        with capture(path, torch.device("cpu")):
            overlapped(self.pair, self.engine)
            self.metric.read()
