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
from functools import partial
from itertools import pairwise

import tyro

from benchmarks.common import full_range, table, take_turns
from moe_dualpipe.schedule import Costs, build, simulate, validate


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
    """Return the number of actions and the seconds to build, validate and simulate them."""
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
    rounds = take_turns(options.rounds, {size: partial(one_round, options.schedule, *size) for size in sizes})
    rows = []
    for (ranks, micro_batches), measured in rounds.items():
        actions, sums = measured[0][0], [sum(seconds) for _, seconds in measured]
        medians = [statistics.median(column) for column in zip(*(seconds for _, seconds in measured), strict=True)]
        together = statistics.median(sums)
        rows.append([
            f"{ranks}", f"{micro_batches:,}", f"{actions:,}", *(f"{median:.3f}" for median in medians),
            f"{together:.2f} ({full_range(sums)})", f"{1e6 * together / actions:.0f}",
        ])  # fmt: skip
    print(f"{options.schedule}: seconds, median of {options.rounds} rounds (range of their sums)\n")
    print(table("ranks | micro-batches | actions | build | validate | simulate | together | us for each action", rows))


if __name__ == "__main__":
    main()
