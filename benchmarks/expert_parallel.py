"""Training speed of two CPU ranks: all experts on both (ep 1), or half on each (ep 2) with each backend.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.expert_parallel

All cases train the same model on the same tokens, and take turns, a step each. Prints for each case the median seconds
of a step, its speed relative to ep 1 in the same round, and the CPU time of both ranks.
"""

import dataclasses
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
import tyro
from torch import Tensor

from benchmarks.common import quartiles, ratios, table, take_turns
from moe_dualpipe.expert_parallel import EpBackend
from moe_dualpipe.models import ModelConfig, preset
from moe_dualpipe.pipeline.pipeline import Pipeline
from moe_dualpipe.runtime.world import join_world
from moe_dualpipe.schedule import build
from moe_dualpipe.training.config import OptimizerConfig

CASES: dict[str, tuple[int, EpBackend]] = {
    "ep 1": (1, "auto"), "ep 2, all_to_all": (2, "all_to_all"), "ep 2, shared": (2, "shared"),
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

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
    with join_world("cpu") as world:
        if world.size != 2:
            raise SystemExit("start two processes: torchrun --nproc-per-node 2 -m benchmarks.expert_parallel")
        for router in options.routers:
            results = measure(dataclasses.replace(preset("tiny"), router=router), world.rank, options)
            if world.rank == 0:
                print(f"router {router}:\n{report(results)}\n", flush=True)


def measure(model: ModelConfig, rank: int, options: Options) -> dict[str, list[tuple[float, float]]]:
    """The seconds and CPU seconds of each case's steps."""
    schedule = build("dualpipev", 1, options.micro_batches)
    shape = (options.sequences, options.seq_len)
    generator = torch.Generator().manual_seed(rank)
    size = options.micro_batches * options.sequences, options.seq_len + 1
    tokens = torch.randint(model.vocab_size, size, generator=generator)
    cases = {}
    for name, (ep, backend) in CASES.items():
        pipeline = Pipeline(model, schedule, shape, ep=ep, ep_backend=backend)
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
