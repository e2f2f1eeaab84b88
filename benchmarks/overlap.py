"""Measure how much communication an overlapped pair hides, and the time that the engine takes of the host.

    python -m benchmarks.overlap                 all parts, about five minutes
    python -m benchmarks.overlap --only link     one part: link, host, recompute

One process plays one rank of 16 over a modeled link (modeled/loopback.py). The computation of a pair is timed first.
Then the bandwidth is set so that the transfers of the pair take the given multiple of that time. All cases take turns,
round by round. Tables give medians, and the range of the ratio over the rounds.

The bound of a round is the longer of two times: that of the pair over an unlimited link, and that of the transfers
alone.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from moe_dualpipe.command_line import program_options
from moe_dualpipe.expert_parallel import Completed, Link, Loopback
from moe_dualpipe.models import RECOMPUTE, ModelConfig, StageOptions, TransformerStage, build_model, next_token_loss
from moe_dualpipe.models.context_parallel import LoopbackContext
from moe_dualpipe.overlap import Collective, Comm, Compute, Engine, Segmented, Segments, in_layer

from .common import full_range, ratios, table, take_turns

MODEL = ModelConfig(
    vocab_size=256, hidden_size=256, num_layers=4, num_dense_layers=0, num_heads=8, num_kv_heads=8, head_dim=32,
    expert_size=192, num_experts=32, experts_per_token=2, num_shared_experts=1,
)  # fmt: skip
RANKS, SEQUENCES, LENGTH = 16, 2, 512
WARM_UP = 1
PAIR_MS, SEGMENTS = 129, 80  # of a pair of 4 layers of DeepSeek-V3 on an H100


@dataclass(frozen=True)
class Options:
    """Measure how much communication an overlapped pair hides, and the time that the engine takes of the host."""

    only: Literal["all", "link", "host", "recompute"] = "all"
    """The part to run."""
    rounds: int = 9
    """Rounds. In each, every case runs once."""
    cp: int = 1
    """For link: context-parallel ranks, each with the positions of this one."""
    ratios: tuple[float, ...] = (0.25, 0.5, 0.7, 1.0, 2.0, 4.0)
    """Ratios of communication to computation time."""


class Pair:
    """The forward of one micro-batch and the backward of another on one stage, over a modeled link."""

    def __init__(self, recompute: Any = "none", cp: int = 1) -> None:
        self.ep = Loopback(MODEL.num_experts, RANKS)
        context = LoopbackContext(cp, self.ep) if cp > 1 else None
        self.model = build_model(MODEL, self.ep, options=StageOptions(recompute=recompute, context=context))
        generator = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randint(MODEL.vocab_size, (2, SEQUENCES, LENGTH), generator=generator)
        self.prepared_bytes = 0

    def sequential(self, link: Link) -> float:
        loss, start = self._forward(link), time.perf_counter()
        next_token_loss(self.model(self.y), self.y)
        loss.backward()
        return time.perf_counter() - start

    def overlapped(self, link: Link) -> float:
        loss, start = self._forward(link), time.perf_counter()
        step, y = TransformerStage.overlapped_forward_backward, [self.y]
        step(self.model, y, next_token_loss, y, self.model, loss, None, None)
        return time.perf_counter() - start

    def _forward(self, link: Link) -> Tensor:
        """Run the forward whose backward is measured, over an infinitely fast link. Then set the link."""
        self.ep.link = Link()
        loss = next_token_loss(self.model(self.x), self.x)
        self.ep.link, self.prepared_bytes = link, self.ep.bytes_sent
        return loss


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}"


def link_part(options: Options) -> None:
    """Time over the modeled link, from fast to slow."""
    tokens = SEQUENCES * LENGTH
    ranks = f"one of {RANKS} ranks, cp {options.cp}"
    print(f"## Modeled link: {ranks}, {MODEL.num_layers} MoE layers, {tokens} tokens per micro-batch\n")
    pair, rows = Pair(cp=options.cp), list[list[str]]()
    free = partial(pair.overlapped, Link())
    free()
    num_bytes = pair.ep.bytes_sent - pair.prepared_bytes
    for ratio in options.ratios:
        total = ratio * statistics.median(free() for _ in range(5))
        slow = Link(gb_per_s=num_bytes / 1e9 / total)
        cases = {
            "free": free, "overlapped": partial(pair.overlapped, slow), "sequential": partial(pair.sequential, slow),
        }  # fmt: skip
        seconds = take_turns(options.rounds, cases, WARM_UP)
        bounds = [max(computation, total) for computation in seconds["free"]]
        unlimited, overlapped, sequential = (statistics.median(seconds[name]) for name in cases)
        cells = []
        for other in (bounds, seconds["sequential"]):
            of_round = ratios(seconds["overlapped"], other)
            cells.append(f"{statistics.median(of_round):.2f} ({full_range(of_round)})")
        hidden = 1 - max(overlapped - unlimited, 0) / total
        rows.append([f"{ratio} ({total / unlimited:.2f})", ms(sequential), ms(overlapped), *cells, f"{hidden:.0%}"])
    columns = (
        "communication / computation: target (actual) | sequential, ms | overlapped, ms | overlapped / bound (range) "
        "| overlapped / sequential (range) | hidden"
    )
    print(table(columns, rows))


class Nothing(Segmented):
    """Layers with the segments of a Mixture-of-Experts block, which compute and send next to nothing."""

    def segments(self, x: Tensor) -> Segments:
        for layer in range(4):
            x = yield from in_layer(layer, self.block(x))
        return x

    def block(self, x: Tensor) -> Segments:
        h = yield Compute("attn", torch.neg, x)
        rows = yield Comm("dispatch", SENT, h)
        y = yield Compute("mlp", torch.neg, rows)
        combined = yield Comm("combine", SENT, y)
        return (yield Compute("add", torch.add, h, combined))

    def plain(self, x: Tensor) -> Tensor:
        for _ in range(4):
            h = x.neg()
            x = h + h.view_as(h).neg().view_as(h)
        return x


def sent(x: Tensor) -> Completed:
    return Completed((x,))


SENT = Collective(sent, sent)


def host_part(options: Options) -> None:
    """The time of the host for a pair: engine and tape, in the order of a GPU, against torch's autograd."""
    print(f"## Host: a pair of 4 layers without work; {PAIR_MS} ms of an H100 are {SEGMENTS} segments\n")
    log, module, x = list[str](), Nothing(), torch.ones(1, requires_grad=True)
    engine, step = Engine(x.device, queued=True, log=log), Nothing.overlapped_forward_backward

    def timed(run: Callable[[Tensor], Tensor], forward: Callable[[Tensor], Tensor]) -> float:
        y, start = forward(x), time.process_time()
        for _ in range(50):
            y = run(y)
        return (time.process_time() - start) / 50

    def pair(y: Tensor) -> Tensor:
        return step(module, [x], None, None, module, None, [y], [y.detach()], engine=engine)[0]

    def plain(y: Tensor) -> Tensor:
        y.backward(y.detach())
        return module.plain(x)

    pair(module(x))
    segments = len(log)
    cases = {"plain autograd": partial(timed, plain, module.plain), "pair": partial(timed, pair, module)}
    seconds = take_turns(options.rounds, cases, WARM_UP)
    us = {name: 1e6 * statistics.median(values) / segments for name, values in seconds.items()}
    rows = [
        [name, f"{us[name]:.1f}", ratio, f"{us[name] * SEGMENTS / PAIR_MS / 1e3:.1%}"]
        for name, _, ratio in compared(seconds)
    ]
    columns = f"{segments} segments | us per segment | / plain autograd (range over rounds) | of the H100's time"
    print(table(columns, rows))


def compared(seconds: dict[str, list[float]]) -> list[list[str]]:
    """A row for each case: name, ms, and the ratio to the first case."""
    base, rows = next(iter(seconds.values())), []
    for name, measured in seconds.items():
        ratio = statistics.median(measured) / statistics.median(base)
        rows.append([name, ms(statistics.median(measured)), f"{ratio:.2f} ({full_range(ratios(measured, base))})"])
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
    times = compared(take_turns(options.rounds, cases, WARM_UP))
    rows = [[name, f"{saved[name]:.1f}", f"{saved[name] / saved['none']:.2f}", *rest] for name, *rest in times]
    print(table("recompute | MiB saved | / none | ms per pair | / none (range over rounds)", rows))


def main() -> None:
    options = program_options(Options, "benchmarks.overlap")
    torch.set_num_threads(1)
    print(f"{os.cpu_count()} cores, one thread, torch {torch.__version__}\n")
    parts = {"link": link_part, "host": host_part, "recompute": recompute_part}
    for name, part in parts.items():
        if options.only in ("all", name):
            part(options)
            print()


if __name__ == "__main__":
    main()
