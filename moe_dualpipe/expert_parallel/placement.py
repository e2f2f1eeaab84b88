"""Where to place experts, and which to copy, so that all GPUs have about the same load.

The algorithm is that of DeepSeek's load balancer (github.com/deepseek-ai/EPLB, MIT license; DeepSeek-V3, arXiv
2412.19437, section 3.4), for each layer separately:

    1. A slot is room for one expert on a GPU. Each expert gets one; each slot that remains gets a copy of the expert
       whose copies have the most load.
    2. The slots are packed onto GPUs: the one with the most load goes to the GPU with the least.

Unlike DeepSeek's, it never puts two copies of an expert on one GPU, where the second takes no load off it, unless there
are more slots than experts times GPUs: an expert gets at most one copy per GPU, and a slot that would be the second one
is exchanged. Example: loads 1000, 1, 1, 1 in 8 slots of 2 GPUs give 501.5 and 501.5; EPLB gives 601 and 402. Sometimes
EPLB is more even: with two of three copies on one GPU, an expert divides its load 2 to 1.

With several nodes, groups of experts are packed onto nodes first, and then both steps are done within each node: a
router that limits the groups of a token (`top_groups`) then sends it to fewer nodes. The copies of an expert get equal
shares of its load.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

Loads = Sequence[Sequence[float]]
"""Load of each expert in each layer: numbers of tokens, or anything proportional to them."""


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """experts: for each layer, the expert in each slot. GPUs have consecutive slots, and nodes consecutive GPUs."""

    experts: tuple[tuple[int, ...], ...]
    num_gpus: int

    def gpu_loads(self, loads: Loads) -> list[list[float]]:
        """The load of each GPU in each layer."""
        per_gpu, found = len(self.experts[0]) // self.num_gpus, []
        for slots, load_E in zip(self.experts, loads, strict=True):
            share_S = [load_E[expert] / slots.count(expert) for expert in slots]
            found.append([sum(share_S[i : i + per_gpu]) for i in range(0, len(slots), per_gpu)])
        return found


def in_order(num_layers: int, num_experts: int, num_gpus: int) -> ExpertPlacement:
    """Experts in the order of their ids, as this package places them. `num_gpus` divides their number."""
    return ExpertPlacement((tuple(range(num_experts)),) * num_layers, num_gpus)


def place_experts(
    loads: Loads, num_slots: int, num_gpus: int, num_nodes: int = 1, num_groups: int = 1
) -> ExpertPlacement:
    """Place the experts of each layer into `num_slots` slots, the same number on each GPU.

    num_groups: groups of consecutive experts that stay on one node; if it is not a multiple of num_nodes, nodes are
    ignored. Raises ValueError if the numbers do not fit each other, or for loads that are negative or not finite.

    Example: loads [[8, 2, 2]], 4 slots, 2 GPUs: expert 0 gets a copy, and GPUs have the experts 0, 1 and 0, 2.
    """
    check_loads(loads)
    _check_numbers(len(loads[0]), num_slots, num_gpus, num_nodes, num_groups)
    if num_groups % num_nodes:
        num_nodes = num_groups = 1
    return ExpertPlacement(
        tuple(_place(load_E, num_slots, num_gpus, num_nodes, num_groups) for load_E in loads), num_gpus
    )


def count_nodes(names: Sequence[str]) -> int:
    """The number of nodes, from the node of each GPU; 1 unless each has the same number of consecutive GPUs."""
    number = len({*names})
    size = len(names) // number
    blocks = [{*names[i : i + size]} for i in range(0, len(names), size)]
    return number if len(names) % number == 0 and all(len(block) == 1 for block in blocks) else 1


def relative(gpu_loads: Loads) -> list[list[float]]:
    """The loads of each layer divided by their mean; 1 for a layer without load."""
    totals = [math.fsum(loads) for loads in gpu_loads]  # fsum: equal loads are exactly 1
    return [[load * len(loads) / total if total else 1.0 for load in loads]
            for loads, total in zip(gpu_loads, totals, strict=True)]  # fmt: skip


def imbalance(gpu_loads: Loads) -> list[float]:
    """The largest load of each layer divided by the mean. 1 is balanced, or a layer without load."""
    return [*map(max, relative(gpu_loads))]


def _place(load_E: Sequence[float], num_slots: int, num_gpus: int, num_nodes: int, num_groups: int) -> tuple[int, ...]:
    group_size = len(load_E) // num_groups
    groups = [range(g * group_size, (g + 1) * group_size) for g in range(num_groups)]
    of_nodes = _pack([sum(load_E[e] for e in group) for group in groups], num_nodes)
    placed: list[int] = []
    for of_node in of_nodes:
        experts = [expert for g in of_node for expert in groups[g]]
        gpus = num_gpus // num_nodes
        slots, copies = _copy([load_E[e] for e in experts], num_slots // num_nodes, gpus)
        share_S = [load_E[experts[i]] / copies[i] for i in slots]
        packed = _spread(_pack(share_S, gpus), slots, share_S)
        placed += [experts[slots[s]] for gpu in packed for s in gpu]
    return tuple(placed)


def _copy(load_E: Sequence[float], num_slots: int, num_gpus: int) -> tuple[list[int], list[int]]:
    """The expert of each slot, and the number of copies of each expert. The first slots have each expert once."""
    slots, copies = [*range(len(load_E))], [1] * len(load_E)
    while len(slots) < num_slots:
        fewer = [e for e in slots[: len(load_E)] if copies[e] < num_gpus] or slots[: len(load_E)]
        largest = max(fewer, key=lambda e: load_E[e] / copies[e])
        slots.append(largest)
        copies[largest] += 1
    return slots, copies


def _spread(bins: list[list[int]], slots: Sequence[int], share_S: Sequence[float]) -> list[list[int]]:
    """Exchange slots between bins until no bin has two copies of an expert.

    Of all exchanges that leave fewer of them, take the one that leaves the two bins with the least maximum. One exists
    as long as an expert has no more copies than there are bins: a bin without the expert has another one twice, or one
    that the first bin lacks.
    """

    def twice(items: Sequence[int]) -> int:
        return len(items) - len({slots[s] for s in items})

    def load(items: Sequence[int]) -> float:
        return sum(share_S[s] for s in items)

    while first := next((b for b in bins if twice(b)), None):
        exchanges = []
        for other in (b for b in bins if b is not first):
            for s, t in product(first, other):
                after = [*(i for i in first if i != s), t], [*(i for i in other if i != t), s]
                if sum(map(twice, after)) < twice(first) + twice(other):
                    exchanges.append((max(map(load, after)), other, after))
        if not exchanges:
            break
        _, other, (first[:], other[:]) = min(exchanges, key=lambda exchange: exchange[0])
    return bins


def _pack(loads: Sequence[float], num_bins: int) -> list[list[int]]:
    """Divide items into bins of equal size and about equal load: the largest first, into the bin with the least."""
    size = len(loads) // num_bins
    if size == 1:
        return [[i] for i in range(num_bins)]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    filled = [0.0] * num_bins
    for item in sorted(range(len(loads)), key=lambda i: -loads[i]):
        least = min((b for b in range(num_bins) if len(bins[b]) < size), key=filled.__getitem__)
        bins[least].append(item)
        filled[least] += loads[item]
    return bins


def check_loads(loads: Loads) -> None:
    """Raise ValueError unless there are loads of as many experts in each layer."""
    if not loads or not loads[0] or any(len(load_E) != len(loads[0]) for load_E in loads):
        raise ValueError("loads need at least one layer, and the same number of experts in each")
    if any(not 0 <= load <= 1e300 for load_E in loads for load in load_E):
        raise ValueError("loads must be finite numbers of at least 0")


def _check_numbers(experts: int, num_slots: int, num_gpus: int, num_nodes: int, num_groups: int) -> None:
    if num_slots < experts:
        raise ValueError(f"{num_slots} slots are too few for {experts} experts")
    for number, what, divisor, over in (
        (num_slots, "slots", num_gpus, "GPUs"), (num_gpus, "GPUs", num_nodes, "nodes"),
        (experts, "experts", num_groups, "groups"),
    ):  # fmt: skip
        if divisor < 1 or number % divisor:
            raise ValueError(f"{number} {what} cannot be divided evenly over {divisor} {over}")
