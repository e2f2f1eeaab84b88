"""How many layers each stage should have: the embedding, the head and dense layers differ in time from the rest.

Dynamic programming over the seconds of each layer after overlap finds the division whose slowest stage is fastest. If a
rank then needs too much memory, its larger stage gets one layer fewer, and the others are divided again.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from .stages import memory_of_ranks
from .step import layer_costs, step_of
from .workload import Workload


def best_layers(load: Workload, memory: float) -> tuple[int, ...]:
    """The number of layers of each stage with the least predicted step. Empty if the usual division is as fast.

    memory: bytes that a rank may need. The usual division is not used if it needs more.
    """
    costs, placement = layer_costs(load), load.placement
    most = [len(costs)] * placement.num_stages
    usual = memory_of_ranks(load)
    ways = [load] if max(rank.total for rank in usual) <= memory else []
    while numbers := divide_within(costs, most):
        way = replace(load, layers=numbers)
        rank, needs = max(enumerate(memory_of_ranks(way)), key=lambda one: one[1].total)
        if needs.total <= memory:
            ways.append(way)
            break
        largest = max(placement.stages[rank], key=lambda stage: numbers[stage])
        most[largest] = numbers[largest] - 1
    return min(ways, key=lambda way: step_of(way).seconds, default=load).layers


def divide_within(costs: Sequence[float], most: Sequence[int]) -> tuple[int, ...]:
    """The sizes of consecutive parts of `costs`, at most `most` each, whose largest sum is smallest. Empty: none fits.

    Example: costs [1, 1, 1, 3] and most [4, 4] -> (3, 1); most [2, 4] -> (2, 2).
    """
    total = [0.0, *accumulate(costs)]
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by the end of the last part
    for limit in most:
        best = {
            end: min(
                (max(largest, total[end] - total[start]), (*sizes, end - start))
                for start, (largest, sizes) in best.items() if 1 <= end - start <= limit
            )
            for end in range(1, len(total)) if any(1 <= end - start <= limit for start in best)
        }  # fmt: skip
    return best[len(costs)][1] if len(costs) in best else ()
