"""Compare the training step time of pipeline schedules with that of one process, on this machine.

    python -m benchmarks.pipeline                      about a minute and a half on two cores
    python -m benchmarks.pipeline --ranks 4 --rounds 5

All configurations train the same model on the same batches. They take turns, round by round, so that a busy machine
slows all of them alike. The table gives the median step over all rounds, the range of the rounds' medians, and the
ratio to one process with as many threads as there are ranks.
"""

import multiprocessing
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist

from benchmarks.common import full_range, table, take_turns
from benchmarks.programs import new_trainer
from moe_dualpipe.command_line import program_options
from moe_dualpipe.models import PRESETS
from moe_dualpipe.runtime.launch import Launch
from moe_dualpipe.schedule import default_micro_batches
from moe_dualpipe.training import BatchConfig, ComputeConfig, HealthConfig, OptimizerConfig, ParallelConfig, TrainConfig

WARM_UP = 2


@dataclass(frozen=True)
class Options:
    """Compare the training step time of pipeline schedules with that of one process, on this machine."""

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


def run_options(options: Options, schedule: str) -> TrainConfig:
    """A training run on CPUs, with at least two layers per pipeline rank."""
    model = PRESETS[options.preset]
    return TrainConfig(
        model=replace(model, num_layers=max(model.num_layers, 2 * options.ranks)),
        parallel=ParallelConfig(schedule=schedule), optim=OptimizerConfig("adamw"),
        batch=BatchConfig(batch_size=2 * default_micro_batches(options.ranks), micro_batch_size=2),
        compute=ComputeConfig(device="cpu"), health=HealthConfig(timeout=60.0),
    )  # fmt: skip


def _measure(rank: int, options: Options, schedule: str, world_size: int, threads: int, out: str) -> list[float]:
    """The seconds of each timed step on this rank."""
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=world_size)
    trainer = new_trainer(run_options(options, schedule), Launch(rank, rank, world_size, world_size))
    seconds = [trainer.step(step).record["seconds"] for step in range(WARM_UP + options.steps)]
    dist.destroy_process_group()
    return seconds[WARM_UP:]


def one_round(options: Options, schedule: str, world_size: int, threads: int) -> list[float]:
    """Time the steps of one configuration in new processes; returns their seconds."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as out, ProcessPoolExecutor(world_size, mp_context=spawn) as pool:
        ranks = [pool.submit(_measure, rank, options, schedule, world_size, threads, out) for rank in range(world_size)]
        first, *_ = [rank.result() for rank in ranks]
    return first


def main() -> None:
    options = program_options(Options, "benchmarks.pipeline")
    os.environ["OMP_NUM_THREADS"] = "1"
    ranks = options.ranks
    names = [name for name in options.schedules if name not in ("dualpipe", "chimera") or ranks % 2 == 0]
    cases = {f"one process, {ranks} threads": partial(one_round, options, "1f1b", 1, ranks)}
    cases |= {f"{name}, {ranks} ranks": partial(one_round, options, name, ranks, 1) for name in names}
    rounds = take_turns(options.rounds, cases)
    medians = {name: statistics.median(chain(*measured)) for name, measured in rounds.items()}
    config = run_options(options, "1f1b")
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
