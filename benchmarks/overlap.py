"""Measure how much communication an overlapped pair hides, and the overhead of the overlap engine.

    python -m benchmarks.overlap                 all parts, about seven minutes
    python -m benchmarks.overlap --only link     one part: link, overhead, recompute, schedulers, network

One process plays one rank of 16 over a modelled link (modelled/loopback.py). The computation of a pair is timed first;
then the bandwidth is set so that the transfers of the pair take a given share of that time. All cases take turns, round
by round. Tables give medians, and the range of the ratio over the rounds.

The bound is the time of the pair if only its segments, in their fixed order, and the link took time. It is replayed
from the measured durations of the segments with two clocks, one for computation and one for the link (docs/overlap.md).
"""

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import tyro
from torch import Tensor

from moe_dualpipe.expert_parallel import Link, Local, Loopback
from moe_dualpipe.models import RECOMPUTE, ModelConfig, StageOptions, TransformerStage, build_model, next_token_loss
from moe_dualpipe.overlap import Engine
from moe_dualpipe.overlap.labels import COMBINE, DISPATCH, is_wait, without_wait
from tests.support.plain_model import plain_forward

from . import network, schedulers

MODEL = ModelConfig(
    vocab_size=256, hidden_size=256, num_layers=4, num_dense_layers=0, num_heads=8, num_kv_heads=8, head_dim=32,
    expert_size=192, num_experts=32, experts_per_token=2, num_shared_experts=1,
)  # fmt: skip
RANKS, SEQUENCES, LENGTH = 16, 2, 512
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    only: Literal["all", "link", "overhead", "recompute", "schedulers", "network"] = "all"
    """The part to run."""
    rounds: int = 9
    """Rounds. In each, every case runs once."""
    ratios: tuple[float, ...] = (0.25, 0.5, 0.7, 1.0, 2.0, 4.0)
    """Ratios of communication to computation time."""


# ---- The bound ----


@dataclass
class Trace:
    """The events of an engine in order: ("compute", seconds), ("start", transfer), ("wait", transfer)."""

    events: list[tuple[str, Any]] = field(default_factory=list)


class TracingEngine(Engine):
    """An engine that records the duration of each segment."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.trace = Trace()
        self._depth, self._since = 0, 0.0

    @contextmanager
    def annotate(self, text: str, layer: int | None, log: bool = True) -> Iterator[None]:
        self._mark()
        self._depth += 1
        try:
            with super().annotate(text, layer, log):
                yield
                if is_wait(text):
                    self.trace.events.append(("wait", without_wait(text)))
        finally:
            self._mark()
            self._depth -= 1
            if log and text.startswith((DISPATCH, COMBINE)):
                self.trace.events.append(("start", text))

    def _mark(self) -> None:
        """Record the time since the last mark if it was inside a segment."""
        now = time.perf_counter()
        if self._depth:
            self.trace.events.append(("compute", now - self._since))
        self._since = now


def median_trace(traces: list[Trace]) -> Trace:
    """The same events, each with its median duration."""
    events: list[tuple[str, Any]] = []
    for same in zip(*(trace.events for trace in traces), strict=True):
        kind, what = same[0]
        assert all(event[0] == kind for event in same), "the order is fixed"
        events.append((kind, statistics.median(event[1] for event in same) if kind == "compute" else what))
    return Trace(events)


def lower_bound(trace: Trace, transfers: list[float]) -> float:
    """The least seconds of the pair if transfer i takes transfers[i] and transfers run one after another."""
    clock = link = 0.0
    arrives: dict[str, deque[float]] = {}
    remaining = deque(transfers)
    for kind, what in trace.events:
        match kind:
            case "compute":
                clock += what
            case "start":
                link = max(link, clock) + remaining.popleft()
                arrives.setdefault(what, deque()).append(link)
            case "wait":
                clock = max(clock, arrives[what].popleft())
    return clock


# ---- Parts ----


class Pair:
    """The forward of one micro-batch and the backward of another on one stage, over a modelled link."""

    def __init__(self) -> None:
        self.ep = Loopback(MODEL.num_experts, RANKS)
        self.model = build_model(MODEL, self.ep)
        self.x, self.y = torch.randint(MODEL.vocab_size, (2, SEQUENCES, LENGTH))

    def sequential(self) -> float:
        loss, start = self._before()
        next_token_loss(self.model(self.y), self.y)
        loss.backward()
        return time.perf_counter() - start

    def overlapped(self, engine: Engine | None = None) -> float:
        loss, start = self._before()
        TransformerStage.overlapped_forward_backward(
            self.model, [self.y], next_token_loss, [self.y], self.model, loss, None, None, engine=engine
        )
        return time.perf_counter() - start

    def _before(self) -> tuple[Tensor, float]:
        """Run the forward of the backward to be measured, over an infinitely fast link."""
        link, self.ep.link = self.ep.link, Link()
        loss = next_token_loss(self.model(self.x), self.x)
        self.ep.link = link
        return loss, time.perf_counter()

    def transfers(self) -> list[float]:
        """The seconds of each transfer of a pair, in order, at 1 GB/s."""
        seconds: list[float] = []
        transfer, self.ep.link = self.ep.timer.transfer, Link(gb_per_s=1.0)
        loss, _ = self._before()
        self.ep.link = Link(gb_per_s=1.0)
        self.ep.timer.transfer = lambda s: (seconds.append(s), transfer(0))[1]  # type: ignore[method-assign]
        TransformerStage.overlapped_forward_backward(
            self.model, [self.y], next_token_loss, [self.y], self.model, loss, None, None
        )
        self.ep.timer.transfer, self.ep.link = transfer, Link()  # type: ignore[method-assign]
        return [s for s in seconds if s]  # exchanging the counts takes no time


def take_turns(rounds: int, cases: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Run each case once to warm up, then once per round. Returns the seconds of each case by round."""
    for case in cases.values():
        case()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            seconds[name].append(case())
    return seconds


def spread(ratios: list[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def link_part(options: Options) -> None:
    """Step time over the modelled link, from fast to slow."""
    pair, engine = Pair(), TracingEngine()
    tokens = SEQUENCES * LENGTH
    print(f"## Modelled link: one of {RANKS} ranks, {MODEL.num_layers} MoE layers, {tokens} tokens per micro-batch\n")
    traces: list[Trace] = []

    def free() -> float:
        engine.trace = Trace()
        traces.append(engine.trace)
        pair.ep.link = Link()
        return pair.overlapped(engine)

    def over(link: Link, run: Callable[[], float]) -> Callable[[], float]:
        def case() -> float:
            pair.ep.link = link
            return run()

        return case

    transfers = pair.transfers()
    share = [t / sum(transfers) for t in transfers]
    free()
    print(
        "| communication / computation: requested (measured) | sequential, ms | overlapped, ms | bound, ms "
        "| overlapped / bound (range) | overlapped / sequential (range) | hidden |"
    )
    print("|---|---|---|---|---|---|---|")
    for ratio in options.ratios:
        total = ratio * statistics.median(free() for _ in range(5))
        slow = Link(gb_per_s=sum(transfers) / total)
        traces.clear()
        seconds = take_turns(options.rounds, {
            "free": free,
            "overlapped": over(slow, pair.overlapped),
            "sequential": over(slow, pair.sequential),
        })  # fmt: skip
        middle = {name: statistics.median(measured) for name, measured in seconds.items()}
        durations = [total * s for s in share]
        bound = lower_bound(median_trace(traces[1:]), durations)
        to_bound = [o / lower_bound(t, durations) for o, t in zip(seconds["overlapped"], traces[1:], strict=True)]
        to_sequential = [o / s for o, s in zip(seconds["overlapped"], seconds["sequential"], strict=True)]
        print(
            f"| {ratio} ({total / middle['free']:.2f}) "
            f"| {1e3 * middle['sequential']:.0f} | {1e3 * middle['overlapped']:.0f} | {1e3 * bound:.0f} "
            f"| {middle['overlapped'] / bound:.2f} ({spread(to_bound)}) "
            f"| {middle['overlapped'] / middle['sequential']:.2f} ({spread(to_sequential)}) "
            f"| {1 - max(middle['overlapped'] - middle['free'], 0) / total:.0%} |"
        )
    print()


def overhead_part(options: Options) -> None:
    """The cost of the tape and the engine, without communication."""
    model = build_model(MODEL, Local(MODEL.num_experts))
    x, y = torch.randint(MODEL.vocab_size, (2, SEQUENCES, LENGTH))

    def timed(run: Callable[[], None]) -> Callable[[], float]:
        def case() -> float:
            model.zero_grad()
            start = time.perf_counter()
            run()
            return time.perf_counter() - start

        return case

    def plain() -> None:
        for tokens in (x, y):
            next_token_loss(plain_forward(model, tokens), tokens).backward()

    def tape() -> None:
        for tokens in (x, y):
            next_token_loss(model(tokens), tokens).backward()

    def overlapped() -> None:
        loss = next_token_loss(model(x), x)
        step = TransformerStage.overlapped_forward_backward
        last = step(model, [y], next_token_loss, [y], model, loss, None, None)[1]
        assert last is not None
        last.backward()

    seconds = take_turns(
        options.rounds, {"plain autograd": timed(plain), "tape": timed(tape), "overlapped": timed(overlapped)}
    )
    print("## Overhead: forward and backward of two chunks, no communication\n")
    print("| | ms for both chunks | / plain autograd (range over rounds) |")
    print("|---|---|---|")
    base = seconds["plain autograd"]
    for name, measured in seconds.items():
        ratios = [m / b for m, b in zip(measured, base, strict=True)]
        print(f"| {name} | {1e3 * statistics.median(measured):.0f} "
              f"| {statistics.median(measured) / statistics.median(base):.3f} ({spread(ratios)}) |")  # fmt: skip
    print()


def recompute_part(options: Options) -> None:
    """The memory that each recomputation level saves for backward, and its time."""
    x, y = torch.randint(MODEL.vocab_size, (2, SEQUENCES, LENGTH))
    saved: dict[str, float] = {}
    cases: dict[str, Callable[[], float]] = {}
    for level in RECOMPUTE:
        model = build_model(MODEL, Loopback(MODEL.num_experts, RANKS), options=StageOptions(recompute=level))  # type: ignore[arg-type]

        def pair(model: TransformerStage = model) -> float:
            loss = next_token_loss(model(x), x)
            start = time.perf_counter()
            TransformerStage.overlapped_forward_backward(model, [y], next_token_loss, [y], model, loss, None, None)
            return time.perf_counter() - start

        pair()
        with torch.profiler.profile(profile_memory=True) as profile:
            loss = next_token_loss(model(x), x)
        saved[level] = sum(event.self_cpu_memory_usage for event in profile.key_averages()) / 2**20
        del loss
        cases[level] = pair
    seconds = take_turns(options.rounds, cases)
    print("## Recompute: memory saved for the backward of a chunk, and time of an overlapped pair\n")
    print("| recompute | MiB saved | / none | ms per pair | / none (range over rounds) |")
    print("|---|---|---|---|---|")
    for level, measured in seconds.items():
        ratios = [m / b for m, b in zip(measured, seconds["none"], strict=True)]
        print(
            f"| {level} | {saved[level]:.1f} | {saved[level] / saved['none']:.2f} "
            f"| {1e3 * statistics.median(measured):.0f} "
            f"| {statistics.median(measured) / statistics.median(seconds['none']):.2f} ({spread(ratios)}) |"
        )
    print()


def schedulers_part(_options: Options) -> None:
    """Our executor against others, in separate processes."""
    print("## Pipeline executors\n", flush=True)
    schedulers.report(schedulers.Options())
    print()


def network_part(_options: Options) -> None:
    """Real processes over a network with a limited rate."""
    print("## Network with a limited rate\n", flush=True)
    for pp in (1, 2):
        network.report(network.Options(pp=pp))
        print()


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    print(f"{os.cpu_count()} cores, one thread, torch {torch.__version__}\n")
    parts = {
        "link": link_part, "overhead": overhead_part, "recompute": recompute_part, "schedulers": schedulers_part,
        "network": network_part,
    }  # fmt: skip
    for name, part in parts.items():
        if options.only in ("all", name):
            part(options)


if __name__ == "__main__":
    main()
