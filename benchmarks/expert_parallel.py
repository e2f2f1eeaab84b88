"""The latency of a dispatch and a combine of few tokens, and on two CPU ranks, the speed of training.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.expert_parallel
    torchrun --nproc-per-node 8 -m benchmarks.expert_parallel                       on GPUs: latency only

Latency is the time in which a layer's tokens travel to their experts and back, of the slowest rank.

Training: all experts on both ranks (ep 1), or half on each (ep 2) with each backend. All cases train the same model on
the same tokens. Prints for each case the median seconds of a step, and its speed relative to ep 1 in the same round.
In both parts, cases take turns.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import quartiles, ratios, table, take_turns
from moe_dualpipe.command_line import program_options
from moe_dualpipe.expert_parallel import EpBackend, ExpertParallel, choose_backend
from moe_dualpipe.models import ModelConfig, preset
from moe_dualpipe.pipeline import Parallel, Pipeline
from moe_dualpipe.runtime.optimizer import Optimizer
from moe_dualpipe.runtime.world import join_world
from moe_dualpipe.schedule import build
from moe_dualpipe.training.config import OptimizerConfig

CASES: dict[str, tuple[int, EpBackend]] = {
    "ep 1": (1, "auto"), "ep 2, all_to_all": (2, "all_to_all"), "ep 2, shared": (2, "shared"),
}  # fmt: skip
EXCHANGES: dict[str, tuple[EpBackend, ...]] = {
    "cpu": ("all_to_all", "shared"), "cuda": ("all_to_all", "symmetric", "copy_engine"),
}  # fmt: skip
EXPERTS, TOP_K = 64, 8


@dataclass(frozen=True)
class Options:
    """The latency of a dispatch and a combine of few tokens, and on two CPU ranks, the speed of training."""

    tokens: tuple[int, ...] = (1, 8, 32, 128)
    """Tokens of a rank, for latencies."""
    hidden_size: int = 2048
    """Numbers of a token, for latencies. 8 of 64 experts."""
    exchanges: int = 200
    """Timed dispatches and combines of each case."""

    rounds: int = 15
    """Timed steps of each case."""
    micro_batches: int = 8
    """Micro-batches of a step on each rank."""
    sequences: int = 2
    """Sequences of a micro-batch."""
    seq_len: int = 256
    """Tokens of a sequence."""
    routers: tuple[Literal["topk", "balanced"], ...] = ("topk", "balanced")
    """topk: untrained routers, which send one rank more tokens than the other. balanced: as many to both."""


def main(options: Options) -> None:
    with join_world() as world:
        if world.size < 2 or (world.device.type == "cpu" and world.size != 2):
            raise SystemExit("start two processes: torchrun --nproc-per-node 2 -m benchmarks.expert_parallel")
        for tokens in options.tokens:
            found = measure_latency(tokens, world.rank, world.device, options)
            if world.rank == 0:
                print(f"{tokens} tokens a rank:\n{latency_report(found)}\n", flush=True)
        for router in options.routers if world.device.type == "cpu" else ():
            results = measure(dataclasses.replace(preset("tiny"), router=router), world.rank, options)
            if world.rank == 0:
                print(f"router {router}:\n{report(results)}\n", flush=True)


def measure_latency(tokens: int, rank: int, device: torch.device, options: Options) -> dict[str, list[float]]:
    """The seconds of each backend's exchanges."""
    world = dist.group.WORLD
    generator = torch.Generator().manual_seed(rank)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices.to(device)
    x = torch.randn(tokens, options.hidden_size, generator=generator).to(device, dtype)
    weights = torch.rand(tokens, TOP_K, generator=generator).to(device)
    sizes: dict[str, Any] = {"max_tokens": tokens, "hidden_size": options.hidden_size, "top_k": TOP_K, "dtype": dtype}
    cases = {}
    for name in EXCHANGES[device.type]:
        backend = choose_backend(name, EXPERTS, world, device, **sizes).backend
        cases[name] = partial(_seconds, partial(_exchange, backend, ids, x, weights), device)
    return take_turns(options.exchanges, cases, warm_up=20)


def _exchange(ep: ExpertParallel, ids: Tensor, x: Tensor, weights: Tensor) -> None:
    """Send tokens to their experts and back."""
    route = ep.prepare(ids)
    rows, _ = ep.dispatch(x, route, weights).wait()
    ep.combine(rows, route).wait()
    if x.is_cuda:
        torch.cuda.synchronize()


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    """The seconds of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    run()
    longest = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def latency_report(found: dict[str, list[float]]) -> str:
    base, rows = found["all_to_all"], []
    for name, seconds in found.items():
        microseconds = quartiles([1e6 * one for one in seconds], ".0f")
        rows.append((name, *microseconds, *quartiles(ratios(seconds, base), ".2f")))
    return table("backend | us | quartiles | time / all_to_all | quartiles", rows)


def measure(model: ModelConfig, rank: int, options: Options) -> dict[str, list[float]]:
    """The seconds of each case's steps, on the slowest rank."""
    schedule = build("dualpipev", 1, options.micro_batches)
    shape = (options.sequences, options.seq_len)
    generator = torch.Generator().manual_seed(rank)
    size = options.micro_batches * options.sequences, options.seq_len + 1
    tokens = torch.randint(model.vocab_size, size, generator=generator)
    cases = {}
    for name, (ep, backend) in CASES.items():
        pipeline = Pipeline(model, schedule, shape, Parallel(ep, backend))
        step = partial(_step, pipeline, pipeline.optimizer(OptimizerConfig("adamw")), tokens)
        cases[name] = partial(_seconds, step, torch.device("cpu"))
    return take_turns(options.rounds, cases, warm_up=3)


def _step(pipeline: Pipeline, optimizer: Optimizer, tokens: Tensor) -> None:
    """Do one training step."""
    pipeline.step(tokens[:, :-1], tokens[:, 1:], sum_gradients=True)
    pipeline.sum_gradients()
    optimizer.step(1e-3, torch.tensor(1 / pipeline.num_micro_batches))
    pipeline.balance_experts(3e-3)


def report(seconds: dict[str, list[float]]) -> str:
    base, rows = seconds["ep 1"], []
    for name, steps in seconds.items():
        speed, spread = quartiles(ratios(base, steps), ".3f")
        rows.append((name, f"{statistics.median(steps):.3f}", speed, spread))
    return table("case | seconds of a step | speed relative to ep 1 | first to third quartile", rows)


if __name__ == "__main__":
    main(program_options(Options, "benchmarks.expert_parallel"))
