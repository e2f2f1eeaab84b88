"""Compare the training step time of pipeline schedules with that of one process, on this machine.

    python -m benchmarks.pipeline                      about a minute and a half on two cores
    python -m benchmarks.pipeline --ranks 4 --rounds 5

All configurations train the same model on the same batches. They take turns, round by round, so that a busy machine
slows all of them alike. The table gives the median step over all rounds, the range of the rounds' medians, and the
ratio to one process with as many threads as there are ranks.
"""

import os
import statistics
import tempfile
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro

from benchmarks.common import full_range, run_options, table, take_turns
from moe_dualpipe.runtime.launch import Launch
from moe_dualpipe.training.config import ParallelConfig
from moe_dualpipe.training.options import Request
from moe_dualpipe.training.resolve import prepare
from moe_dualpipe.training.step import Trainer

WARM_UP = 2


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    ranks: int = 2
    """Pipeline ranks."""
    steps: int = 6
    """Timed steps per round."""
    rounds: int = 3
    """Rounds. In each, every configuration runs once."""
    preset: str = "tiny"
    """Model preset; it gets at least two layers per rank."""
    schedules: tuple[str, ...] = ("1f1b", "dualpipe", "dualpipev")
    """Schedules to run. If the number of ranks is odd, those that need an even number are skipped."""


def _measure(rank: int, options: Options, schedule: str, world_size: int, threads: int, out: str, results: Any) -> None:
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world_size)
    config = run_options(options.ranks, ParallelConfig(schedule=schedule), out, options.preset)
    trainer = Trainer(prepare(Request(config), Launch(rank, rank, world_size, world_size)))
    seconds = [trainer.step(step).record["seconds"] for step in range(WARM_UP + options.steps)]
    if rank == 0:
        results.put(seconds[WARM_UP:])
    dist.destroy_process_group()


def one_round(options: Options, schedule: str, world_size: int, threads: int) -> list[float]:
    """Time the steps of one configuration in new processes; returns their seconds."""
    with tempfile.TemporaryDirectory() as out:
        results = mp.get_context("spawn").SimpleQueue()
        arguments = (options, schedule, world_size, threads, out, results)
        mp.start_processes(_measure, arguments, nprocs=world_size, start_method="spawn")
        return results.get()


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    os.environ["OMP_NUM_THREADS"] = "1"
    ranks = options.ranks
    names = [name for name in options.schedules if name not in ("dualpipe", "chimera") or ranks % 2 == 0]
    cases = {f"one process, {ranks} threads": partial(one_round, options, "1f1b", 1, ranks)}
    cases |= {f"{name}, {ranks} ranks": partial(one_round, options, name, ranks, 1) for name in names}
    rounds = take_turns(options.rounds, cases)
    medians = {name: statistics.median(chain(*measured)) for name, measured in rounds.items()}
    config = run_options(ranks, ParallelConfig(), "", options.preset)
    layers, batch = config.model.num_layers, config.batch
    tokens = batch.batch_size * batch.seq_len
    rows = []
    for name, measured in rounds.items():
        median, baseline = medians[name], next(iter(medians.values()))
        by_round = full_range([1e3 * statistics.median(seconds) for seconds in measured], ".0f")
        rows.append([name, f"{1e3 * median:.0f}", by_round, f"{tokens / median:,.0f}", f"{median / baseline:.2f}"])
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, {layers} layers, {tokens:,} tokens per step")
    print(table("configuration | ms per step | range of rounds | tokens/s | step time / one process", rows))


if __name__ == "__main__":
    main()
