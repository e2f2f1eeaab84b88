"""Measure how much communication an overlapped pair hides, and the overhead of the overlap engine.

    python -m benchmarks.overlap                 all parts, about seven minutes
    python -m benchmarks.overlap --only link     one part: link, overhead, recompute, schedulers, network

One process plays one rank of 16 over a modeled link (modeled/loopback.py). The computation of a pair is timed first.
Then the bandwidth is set so that the transfers of the pair take the given multiple of that time. All cases take turns,
round by round. Tables give medians, and the range of the ratio over the rounds.

The bound is the shortest time in which the pair can run with its segments in their order and of their measured lengths
(tools/profiler/bound.py).
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import tyro
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_dualpipe.expert_parallel import Link, Local, Loopback
from moe_dualpipe.models import RECOMPUTE, ModelConfig, StageOptions, TransformerStage, build_model, next_token_loss
from moe_dualpipe.overlap import Engine
from moe_dualpipe.overlap.labels import COMBINE, DISPATCH, is_wait, without_wait
from moe_dualpipe.tools.profiler.bound import Compute, Event, Start, Wait, least_time
from tests.support.plain_model import plain_forward

from . import network, schedulers
from .common import full_range, ratios, table, take_turns

MODEL = ModelConfig(
    vocab_size=256, hidden_size=256, num_layers=4, num_dense_layers=0, num_heads=8, num_kv_heads=8, head_dim=32,
    expert_size=192, num_experts=32, experts_per_token=2, num_shared_experts=1,
)  # fmt: skip
RANKS, SEQUENCES, LENGTH = 16, 2, 512
WARM_UP = 1
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


class TracingEngine(Engine):
    """An engine that records the duration of each segment."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.events: list[Event] = []
        self._depth, self._since = 0, 0.0

    @contextmanager
    def annotate(self, text: str, layer: int | None, log: bool = True, source: Any = None) -> Iterator[None]:
        self._mark()
        self._depth += 1
        try:
            with super().annotate(text, layer, log, source):
                yield
                if is_wait(text):
                    self.events.append(Wait(without_wait(text)))
        finally:
            self._mark()
            self._depth -= 1
            if log and text.startswith((DISPATCH, COMBINE)):
                self.events.append(Start(text))

    def _mark(self) -> None:
        """Record the time since the last mark if it was inside a segment."""
        now = time.perf_counter()
        if self._depth:
            self.events.append(Compute(now - self._since))
        self._since = now


def median_events(runs: list[list[Event]]) -> list[Event]:
    """The same events, each with its median duration."""
    events: list[Event] = []
    for same in zip(*runs, strict=True):
        assert len({(type(event), getattr(event, "label", None)) for event in same}) == 1, "the order is fixed"
        first, *_ = same
        times = [event.time for event in same if isinstance(event, Compute)]
        events.append(Compute(statistics.median(times)) if times else first)
    return events


def lower_bound(events: list[Event], transfers: list[float]) -> float:
    """The shortest seconds of the pair if transfer i takes transfers[i]."""
    remaining = iter(transfers)
    return least_time(e._replace(time=next(remaining)) if isinstance(e, Start) else e for e in events)


# ---- Parts ----


def pair_step(model: TransformerStage, x: Tensor, loss: Tensor, engine: Engine | None = None) -> Tensor:
    """The forward of `x` overlapped with the backward of `loss`. Returns the loss of `x`."""
    step = TransformerStage.overlapped_forward_backward
    result = step(model, [x], next_token_loss, [x], model, loss, None, None, engine=engine)[1]
    assert result is not None
    return result


def two_micro_batches() -> Tensor:
    return torch.randint(MODEL.vocab_size, (2, SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))


class Pair:
    """The forward of one micro-batch and the backward of another on one stage, over a modeled link."""

    def __init__(self, recompute: Any = "none") -> None:
        self.ep = Loopback(MODEL.num_experts, RANKS)
        self.model = build_model(MODEL, self.ep, options=StageOptions(recompute=recompute))
        self.x, self.y = two_micro_batches()

    def sequential(self, link: Link) -> float:
        loss, start = self._forward(link), time.perf_counter()
        next_token_loss(self.model(self.y), self.y)
        loss.backward()
        return time.perf_counter() - start

    def overlapped(self, link: Link, engine: Engine | None = None) -> float:
        loss, start = self._forward(link), time.perf_counter()
        pair_step(self.model, self.y, loss, engine)
        return time.perf_counter() - start

    def _forward(self, link: Link) -> Tensor:
        """Run the forward whose backward is measured, over an infinitely fast link. Then set the link."""
        self.ep.link = Link()
        loss = next_token_loss(self.model(self.x), self.x)
        self.ep.link = link
        return loss

    def transfers(self) -> list[float]:
        """The seconds of each transfer of a pair, in order, at 1 GB/s."""
        seconds: list[float] = []
        transfer = self.ep.timer.transfer
        loss = self._forward(Link(gb_per_s=1.0))
        self.ep.timer.transfer = lambda s: (seconds.append(s), transfer(0))[1]  # type: ignore[method-assign]
        pair_step(self.model, self.y, loss)
        self.ep.timer.transfer = transfer  # type: ignore[method-assign]
        return [s for s in seconds if s]  # exchanging the counts takes no time


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}"


def link_part(options: Options) -> None:
    """Step time over the modeled link, from fast to slow."""
    tokens = SEQUENCES * LENGTH
    print(f"## Modeled link: one of {RANKS} ranks, {MODEL.num_layers} MoE layers, {tokens} tokens per micro-batch\n")
    pair, engine, runs, rows = Pair(), TracingEngine(), list[list[Event]](), list[list[str]]()

    def free() -> float:
        engine.events = []
        runs.append(engine.events)
        return pair.overlapped(Link(), engine)

    transfers = pair.transfers()
    free()
    for ratio in options.ratios:
        total = ratio * statistics.median(free() for _ in range(5))
        durations = [total * transfer / sum(transfers) for transfer in transfers]
        slow = Link(gb_per_s=sum(transfers) / total)
        runs.clear()
        cases = {
            "free": free, "overlapped": partial(pair.overlapped, slow), "sequential": partial(pair.sequential, slow),
        }  # fmt: skip
        seconds = take_turns(options.rounds, cases, WARM_UP)
        unlimited, overlapped, sequential = (statistics.median(seconds[name]) for name in cases)
        bounds = [lower_bound(events, durations) for events in runs[WARM_UP:]]
        bound = lower_bound(median_events(runs[WARM_UP:]), durations)
        to_bound = full_range(ratios(seconds["overlapped"], bounds))
        to_sequential = full_range(ratios(seconds["overlapped"], seconds["sequential"]))
        rows.append([
            f"{ratio} ({total / unlimited:.2f})", ms(sequential), ms(overlapped), ms(bound),
            f"{overlapped / bound:.2f} ({to_bound})", f"{overlapped / sequential:.2f} ({to_sequential})",
            f"{1 - max(overlapped - unlimited, 0) / total:.0%}",
        ])  # fmt: skip
    columns = (
        "communication / computation: target (actual) | sequential, ms | overlapped, ms | bound, ms "
        "| overlapped / bound (range) | overlapped / sequential (range) | hidden"
    )
    print(table(columns, rows))


def overhead_part(options: Options) -> None:
    """The cost of the tape and the engine, without communication: time, and the number of operators."""
    print("## Overhead: forward and backward of two chunks, no communication\n")
    model = build_model(MODEL, Local(MODEL.num_experts))
    x, y = two_micro_batches()

    def timed(run: Callable[[], None]) -> float:
        model.zero_grad()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def one_by_one(forward: Callable[[Tensor], Tensor]) -> None:
        for tokens in (x, y):
            next_token_loss(forward(tokens), tokens).backward()

    cases = {
        "plain autograd": lambda: one_by_one(partial(plain_forward, model)),
        "tape": lambda: one_by_one(model),
        "overlapped": lambda: pair_step(model, y, next_token_loss(model(x), x)).backward(),
    }
    seconds = take_turns(options.rounds, {name: partial(timed, run) for name, run in cases.items()}, WARM_UP)
    rows = compared(seconds, ".3f")
    for row, run in zip(rows, cases.values(), strict=True):
        with Operators() as operators:
            timed(run)
        row += [str(operators.number), str(operators.views)]
    print(table(" | ms for both chunks | / plain autograd (range over rounds) | operators | views", rows))


class Operators(TorchDispatchMode):
    """Counts what the host queues on a GPU: 5 to 10 us for an operator, about 1 us for a view."""

    def __init__(self) -> None:
        super().__init__()
        self.number = self.views = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.views += func.is_view
        self.number += not func.is_view
        return func(*args, **(kwargs or {}))


def compared(seconds: dict[str, list[float]], form: str) -> list[list[str]]:
    """A row for each case: name, ms, and the ratio to the first case."""
    base, rows = next(iter(seconds.values())), []
    for name, measured in seconds.items():
        ratio = statistics.median(measured) / statistics.median(base)
        rows.append([name, ms(statistics.median(measured)), f"{ratio:{form}} ({full_range(ratios(measured, base))})"])
    return rows


def recompute_part(options: Options) -> None:
    """The memory that each recomputation level saves for backward, and its time."""
    print("## Recompute: memory saved for the backward of a chunk, and time of an overlapped pair\n")
    saved: dict[str, float] = {}
    cases: dict[str, Callable[[], float]] = {}
    for level in RECOMPUTE:
        pair = Pair(level)
        cases[level] = partial(pair.overlapped, Link())
        cases[level]()
        with torch.profiler.profile(profile_memory=True) as profile:
            loss = next_token_loss(pair.model(pair.x), pair.x)
        saved[level] = sum(event.self_cpu_memory_usage for event in profile.key_averages()) / 2**20
        del loss
    times = compared(take_turns(options.rounds, cases, WARM_UP), ".2f")
    rows = [[name, f"{saved[name]:.1f}", f"{saved[name] / saved['none']:.2f}", *rest] for name, *rest in times]
    print(table("recompute | MiB saved | / none | ms per pair | / none (range over rounds)", rows))


def schedulers_part(_options: Options) -> None:
    """Our executor against others, in separate processes."""
    print("## Pipeline executors\n", flush=True)
    schedulers.report(schedulers.Options())


def network_part(_options: Options) -> None:
    """Real processes over a network with a limited rate."""
    for pp in (1, 2):
        print(f"## Network with a limited rate, {pp} pipeline ranks\n", flush=True)
        network.report(network.Options(pp=pp))


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
            print()


if __name__ == "__main__":
    main()
