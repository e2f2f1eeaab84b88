"""The latency of a dispatch and a combine of few tokens, and on two CPU ranks, the speed of training.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.expert_parallel
    torchrun --nproc-per-node 8 -m benchmarks.expert_parallel                       on GPUs: latency only

Latency is the time in which a layer's tokens travel to their experts and back, of the slowest rank. On GPUs, a profile
of one more exchange adds the time of multiprocessors that its transfer kernels take: blocks x duration.

Training: all experts on both ranks (ep 1), or half on each (ep 2) with each backend. All cases train the same model on
the same tokens. Prints for each case the median seconds of a step, its speed relative to ep 1 in the same round, and
the CPU time of both ranks. In both parts, cases take turns.
"""

import dataclasses
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from torch import Tensor

from benchmarks.common import quartiles, ratios, table, take_turns
from moe_dualpipe.expert_parallel import EpBackend, ExpertParallel, choose_backend
from moe_dualpipe.models import ModelConfig, preset
from moe_dualpipe.pipeline import Parallel, Pipeline
from moe_dualpipe.runtime.world import join_world
from moe_dualpipe.schedule import build
from moe_dualpipe.tools.profiler.communication import NAMES
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
    """Options of the benchmark."""

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


def measure_latency(
    tokens: int, rank: int, device: torch.device, options: Options
) -> dict[str, tuple[list[float], float]]:
    """The seconds of each backend's exchanges, and the seconds of multiprocessors that one takes on a GPU."""
    world = dist.group.WORLD
    generator = torch.Generator().manual_seed(rank)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K).indices.to(device)
    x = torch.randn(tokens, options.hidden_size, generator=generator).to(device, dtype)
    weights = torch.rand(tokens, TOP_K, generator=generator).to(device)
    sizes: dict[str, Any] = {"max_tokens": tokens, "hidden_size": options.hidden_size, "top_k": TOP_K, "dtype": dtype}
    cases = {
        name: partial(_exchange, choose_backend(name, EXPERTS, world, device, **sizes).backend, ids, x, weights)
        for name in EXCHANGES[device.type]
    }
    seconds = take_turns(
        options.exchanges, {name: partial(_seconds, case, device) for name, case in cases.items()}, warm_up=20
    )
    return {name: (seconds[name], multiprocessor_seconds(case) if x.is_cuda else 0.0) for name, case in cases.items()}


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


def multiprocessor_seconds(run: Callable[[], None]) -> float:
    """The blocks of the kernels that transfer something during `run`, times their seconds."""
    with tempfile.TemporaryDirectory() as folder:
        with torch.profiler.profile() as profile:
            run()
        profile.export_chrome_trace(file := f"{folder}/trace.json")
        return transfer_blocks(json.loads(Path(file).read_text())["traceEvents"])


def transfer_blocks(events: list[dict[str, Any]]) -> float:
    """The blocks of the transfer kernels in a trace, times their seconds."""
    kernels = [one for one in events if one.get("cat") == "kernel" and NAMES.is_communication(one["name"])]
    return sum(math.prod(one["args"]["grid"]) * one["dur"] for one in kernels) / 1e6


def latency_report(found: dict[str, tuple[list[float], float]]) -> str:
    base, rows = found["all_to_all"][0], []
    for name, (seconds, blocks) in found.items():
        latency, spread = quartiles([1e6 * one for one in seconds], ".0f")
        relative, of_relative = quartiles(ratios(seconds, base), ".2f")
        rows.append((name, latency, spread, relative, of_relative, f"{1e6 * blocks:.0f}" if blocks else "-"))
    return table("backend | us | quartiles | time / all_to_all | quartiles | blocks x us", rows)


def measure(model: ModelConfig, rank: int, options: Options) -> dict[str, list[tuple[float, float]]]:
    """The seconds and CPU seconds of each case's steps."""
    schedule = build("dualpipev", 1, options.micro_batches)
    shape = (options.sequences, options.seq_len)
    generator = torch.Generator().manual_seed(rank)
    size = options.micro_batches * options.sequences, options.seq_len + 1
    tokens = torch.randint(model.vocab_size, size, generator=generator)
    cases = {}
    for name, (ep, backend) in CASES.items():
        pipeline = Pipeline(model, schedule, shape, Parallel(ep, backend))
        cases[name] = partial(_step, pipeline, pipeline.optimizer(OptimizerConfig()), tokens)
    return take_turns(options.rounds, cases, warm_up=3)


def _step(pipeline: Pipeline, optimizer, tokens: Tensor) -> tuple[float, float]:
    """Do one training step. Returns its seconds, and the CPU seconds of both ranks."""
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    pipeline.step(tokens[:, :-1], tokens[:, 1:], sum_gradients=True)
    pipeline.sum_gradients()
    optimizer.step(1e-3, torch.tensor(1 / pipeline.num_micro_batches))
    pipeline.balance_experts(3e-3)
    times = torch.tensor([time.perf_counter() - start, time.process_time() - cpu], dtype=torch.float64)
    dist.all_reduce(longest := times[:1].clone(), dist.ReduceOp.MAX)
    dist.all_reduce(times)
    return longest.item(), times[1].item()


def report(results: dict[str, list[tuple[float, float]]]) -> str:
    seconds = {name: [one for one, _ in steps] for name, steps in results.items()}
    base, rows = seconds["ep 1"], []
    for name, steps in results.items():
        speed, spread = quartiles(ratios(base, seconds[name]), ".3f")
        cpu = statistics.median(cpu for _, cpu in steps)
        rows.append((name, f"{statistics.median(seconds[name]):.3f}", speed, spread, f"{cpu:.3f}"))
    return table("case | seconds of a step | speed relative to ep 1 | first to third quartile | CPU seconds", rows)


if __name__ == "__main__":
    main(tyro.cli(Options))
