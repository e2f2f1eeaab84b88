"""Compare the training step time of pipeline schedules with that of one process, on this machine.

    python -m benchmarks.pipeline                      about a minute and a half on two cores
    python -m benchmarks.pipeline --ranks 4 --rounds 5

All configurations train the same model on the same batches (4,096 tokens per step). They take turns, round by round, so
that a busy machine slows all of them alike. The table gives the median step over all rounds, the range of the rounds'
medians, and the ratio to one process with as many threads as there are ranks.
"""

import dataclasses
import os
import statistics
import tempfile
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro

from moe_dualpipe.models import PRESETS, ModelConfig
from moe_dualpipe.runtime.launch import Launch
from moe_dualpipe.schedule import default_micro_batches
from moe_dualpipe.training.config import BatchConfig, CheckpointConfig, ComputeConfig, ParallelConfig, TrainConfig
from moe_dualpipe.training.plan import plan_run
from moe_dualpipe.training.trainer import Trainer

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
    """Schedules to run. Those that need an even number of ranks are skipped if it is odd."""


def _measure(rank: int, config: TrainConfig, world_size: int, threads: int, steps: int, store: str, results) -> None:
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    trainer = Trainer(plan_run(config, Launch(rank, rank, world_size, world_size)))
    seconds = [trainer.train_step(step)["seconds"] for step in range(WARM_UP + steps)]
    if rank == 0:
        results.put(seconds[WARM_UP:])
    dist.destroy_process_group()


def one_round(config: TrainConfig, world_size: int, threads: int, steps: int) -> list[float]:
    """Time the steps of one configuration in new processes; returns their seconds."""
    with tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("spawn").SimpleQueue()
        config = dataclasses.replace(config, checkpoint=CheckpointConfig(out=folder))
        arguments = (config, world_size, threads, steps, f"{folder}/store", results)
        mp.start_processes(_measure, arguments, nprocs=world_size, start_method="spawn")
        return results.get()


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    os.environ["OMP_NUM_THREADS"] = "1"
    base = PRESETS[options.preset]
    model: ModelConfig = dataclasses.replace(base, num_layers=max(base.num_layers, 2 * options.ranks))
    micro_batches = default_micro_batches(options.ranks)  # the single process uses as many
    config = TrainConfig(
        preset=options.preset,
        model=model,
        batch=BatchConfig(micro_batches=micro_batches),
        compute=ComputeConfig(device="cpu"),
    )
    cases = {
        f"one process, {options.ranks} threads": (
            dataclasses.replace(config, parallel=ParallelConfig(schedule="1f1b")),
            1,
            options.ranks,
        ),
        **{
            f"{schedule}, {options.ranks} ranks": (
                dataclasses.replace(config, parallel=ParallelConfig(schedule=schedule)),
                options.ranks,
                1,
            )
            for schedule in options.schedules
            if schedule not in ("dualpipe", "chimera") or options.ranks % 2 == 0
        },
    }
    rounds: dict[str, list[list[float]]] = {name: [] for name in cases}
    for _ in range(options.rounds):
        for name, (case, world_size, threads) in cases.items():
            rounds[name].append(one_round(case, world_size, threads, options.steps))
    tokens = micro_batches * config.batch.micro_batch_size * config.batch.seq_len
    baseline = None
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, {model.num_layers} layers, {tokens:,} tokens per step")
    print("| configuration | ms per step | range of rounds | tokens/s | step time / one process |")
    print("|---|---|---|---|---|")
    for name, measured in rounds.items():
        median = statistics.median(second for seconds in measured for second in seconds)
        medians = [statistics.median(seconds) for seconds in measured]
        baseline = baseline or median
        print(
            f"| {name} | {1e3 * median:.0f} | {1e3 * min(medians):.0f} to {1e3 * max(medians):.0f} "
            f"| {tokens / median:,.0f} | {median / baseline:.2f} |"
        )


if __name__ == "__main__":
    main()
