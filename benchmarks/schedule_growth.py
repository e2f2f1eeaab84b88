"""Measure how the time to build, validate and simulate a schedule grows with its size.

    python -m benchmarks.schedule_growth                      half a minute
    python -m benchmarks.schedule_growth --schedule zbv --ranks 8 16

The number of actions grows with ranks x micro-batches, and there are 16 micro-batches per rank, so twice the ranks give
four times the actions. If the cost is linear in the actions, the last column is constant. Sizes take turns, round by
round.
"""

import statistics
import time
from dataclasses import dataclass
from itertools import pairwise

import tyro

from moe_dualpipe.schedule import Costs, build, simulate, validate

STEPS = ("build", "validate", "simulate")


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    schedule: str = "dualpipe"
    """Name of the schedule."""
    ranks: tuple[int, ...] = (8, 16, 32, 64)
    """Pipeline ranks."""
    micro_batches_per_rank: int = 16
    """Micro-batches per rank."""
    rounds: int = 5
    """Rounds. In each, every size runs once."""


def one_round(name: str, ranks: int, micro_batches: int) -> tuple[int, list[float]]:
    """Return the number of actions and the seconds of each of STEPS."""
    times = [time.perf_counter()]
    schedule = build.__wrapped__(name, ranks, micro_batches)  # bypass the cache
    times.append(time.perf_counter())
    validate(schedule)
    times.append(time.perf_counter())
    simulate(schedule, Costs(F=2, B=5, W=2, FB=6))
    times.append(time.perf_counter())
    return sum(map(len, schedule.actions)), [after - before for before, after in pairwise(times)]


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    sizes = [(ranks, ranks * options.micro_batches_per_rank) for ranks in options.ranks]
    actions: dict[int, int] = {}
    rounds: dict[int, list[list[float]]] = {ranks: [] for ranks in options.ranks}
    for _ in range(options.rounds):
        for ranks, micro_batches in sizes:
            actions[ranks], seconds = one_round(options.schedule, ranks, micro_batches)
            rounds[ranks].append(seconds)
    print(f"{options.schedule}: seconds, median of {options.rounds} rounds (range of their sums)\n")
    print("| ranks | micro-batches | actions | build | validate | simulate | together | us for each action |")
    print("|" + "---|" * 8)
    for ranks, micro_batches in sizes:
        medians = [statistics.median(column) for column in zip(*rounds[ranks], strict=True)]
        sums = [sum(seconds) for seconds in rounds[ranks]]
        together = statistics.median(sums)
        print(
            f"| {ranks} | {micro_batches:,} | {actions[ranks]:,} | {' | '.join(f'{m:.3f}' for m in medians)} | "
            f"{together:.2f} ({min(sums):.2f} to {max(sums):.2f}) | {1e6 * together / actions[ranks]:.0f} |"
        )


if __name__ == "__main__":
    main()
