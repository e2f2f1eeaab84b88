"""Measure how the start of a run and the bookkeeping of a step grow with the number of ranks, up to 4,096.

    python -m benchmarks.scale                       a minute
    python -m benchmarks.scale --worlds 64 16384

One rank runs the real code of a training run: process groups, checks between ranks, a tiny model, its optimizer and
steps. The other ranks are not there: each group answers as if they had sent what this rank sends. So times are those of
this rank's own work, without waits. Each size has a process of its own. Pipelines have 4 ranks, and 8 share experts.
"""

import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from unittest import mock

import torch.distributed as dist

from benchmarks.common import table
from benchmarks.programs import new_trainer
from moe_dualpipe.command_line import program_options
from moe_dualpipe.models import ModelConfig
from moe_dualpipe.pipeline import Pipeline
from moe_dualpipe.runtime.launch import Launch
from moe_dualpipe.training import BatchConfig, OptimizerConfig, ParallelConfig, TrainConfig
from tests.machines.recording_group import recording_world

STEPS = 5


@dataclass(frozen=True)
class Options:
    """Measure how the start of a run and the bookkeeping of a step grow with the number of ranks, up to 4,096."""

    worlds: tuple[int, ...] = (64, 256, 1024, 4096)
    """Numbers of ranks: multiples of 32."""


def measure_rank(ranks: int) -> dict[str, float]:
    """Build a run as one rank of `ranks`, and do steps. Returns seconds, MiB, and numbers of groups."""
    model = ModelConfig(
        num_layers=4, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, dense_size=16, expert_size=8
    )  # fmt: skip
    config = TrainConfig(
        model=model, steps=STEPS, batch=BatchConfig(batch_size=2 * ranks, micro_batch_size=1, seq_len=16),
        parallel=ParallelConfig(pp=4, ep=8, ep_backend="all_to_all"), optim=OptimizerConfig("adamw"),
    )  # fmt: skip
    same = mock.patch.object(Pipeline, "_check_same_batch")  # ranks of other pipelines would send other batches
    with recording_world(0, ranks), same, mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        trainer = new_trainer(config, Launch(0, 0, ranks, 1))
        built = time.perf_counter()
        trainer.step(0)
        seconds = []
        for step in range(1, STEPS):
            begin = time.perf_counter()
            trainer.step(step)
            seconds.append(time.perf_counter() - begin)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        member = len(dist.distributed_c10d._world.pg_names)
    return {
        "ranks": ranks, "start": built - start, "step": min(seconds), "memory": memory / 1024, "member": member,
        "calls": new_group.call_count,
    }  # fmt: skip


def measured(ranks: int) -> dict[str, float]:
    """The result for one number of ranks, in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure_rank, ranks).result()


def main() -> None:
    options = program_options(Options, "benchmarks.scale")
    rows = []
    for ranks in options.worlds:
        found = measured(ranks)
        counts = f"{ranks:,}", f"{found['calls']:,}", f"{found['member']}"
        rows.append([*counts, f"{found['start']:.2f}", f"{1e3 * found['step']:.0f}", f"{found['memory']:.0f}"])
    print(table("ranks | groups of the run | of this rank | start, s | step, ms | MiB", rows))


if __name__ == "__main__":
    main()
