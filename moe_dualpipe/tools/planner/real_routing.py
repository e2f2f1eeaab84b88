"""How uneven real routing is: the tokens of the fullest rank of an expert group, relative to the mean.

The loads of a layer's experts, in order, fall off like 1 / (i + 1)^s (Zipf); which expert is popular differs between
layers. All ranks of a group wait for the fullest.
"""

import functools
import random
import statistics

ZIPF = 0.1
"""Exponent of the loads: between those that fit three published runs with real routing, Mixtral-8x22B (0.06), Moonlight
(below 0.05) and Qwen3-30B at its start (0.4), relative to runs with balanced routing on the same GPUs."""
DRAWS = 200


@functools.lru_cache(maxsize=256)
def load_factor(experts: int, top_k: int, ep: int, exponent: float = ZIPF) -> float:
    """The largest of `ep` ranks' loads over the mean, averaged over random placements of the experts. At least 1.

    Example: with one rank, 1. The order of draws is fixed, so the result always is the same.
    """
    if ep == 1 or not experts:
        return 1.0
    loads = [1 / (i + 1) ** exponent for i in range(experts)]
    most = experts / top_k  # a token chooses an expert at most once: a load of 1 / top_k of all choices is the largest
    mean = sum(loads) / experts
    loads = [min(load / mean, most) for load in loads]
    generator, each = random.Random(0), experts // ep
    highest = []
    for _ in range(DRAWS):
        generator.shuffle(loads)
        highest.append(max(sum(loads[i : i + each]) for i in range(0, experts, each)) / each)
    return statistics.fmean(highest)
