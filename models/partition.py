"""Divide the layers over stages: as a list says, or so that all stages have about the same FLOPs."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from moe_dualpipe.messages import plural

from .config import ModelConfig
from .costs import flops_shape


@dataclass(frozen=True, slots=True)
class StageSpec:
    """What one stage holds: a range of blocks, the embedding, the head, and its share of the model's FLOPs.

    mtp: the blocks of multi-token prediction, which follow the last layer; only on the last stage.
    """

    layers: range
    embedding: bool
    head: bool
    share: float
    mtp: range = range(0)

    @property
    def blocks(self) -> list[int]:
        """The indices of all blocks of the stage, in order."""
        return [*self.layers, *self.mtp]

    def __str__(self) -> str:
        first, last = self.layers[0], self.layers[-1]
        parts = ["embedding"] * self.embedding
        parts += [f"layer {first}" if first == last else f"layers {first}-{last}"]
        parts += ["head"] * self.head
        parts += [plural(len(self.mtp), "MTP module")] * bool(self.mtp)
        return f"{' + '.join(parts)} ({self.share:.0%} of the work)"


def check_stages(num_stages: int, num_layers: int) -> None:
    """Raise ValueError if there are fewer layers than stages."""
    if num_layers < num_stages:
        raise ValueError(
            f"{plural(num_layers, 'layer')} cannot be divided over {plural(num_stages, 'pipeline stage')}: "
            f"use at least {num_stages} layers, fewer pipeline ranks, or a schedule with fewer stages (1f1b)"
        )


def check_layers_of_stages(layers: Sequence[int], num_stages: int, num_layers: int) -> None:
    """Raise ValueError unless `layers` has a number of layers for each stage, all together."""
    given = f"parallel.layers {','.join(map(str, layers))}"
    if len(layers) != num_stages:
        raise ValueError(f"{given} is for {plural(len(layers), 'stage')}, and the schedule has {num_stages}")
    if sum(layers) != num_layers or min(layers) < 1:
        what = f"must be at least 1 each and sum to {num_layers}, the layers of the model"
        raise ValueError(f"{given} {what}: got {sum(layers)}")


def split(config: ModelConfig, num_stages: int, layers: Sequence[int] = ()) -> tuple[StageSpec, ...]:
    """Divide the blocks over `num_stages` stages so that the slowest stage is as fast as possible.

    layers: the number of blocks of each stage instead. Raises ValueError if there are fewer blocks than stages, and for
    `layers` that do not fit.
    """
    if layers:
        check_layers_of_stages(layers, num_stages, config.num_layers)
    check_stages(num_stages, config.num_layers)
    shape = flops_shape(config)
    costs = [layer.flops(shape.hidden) for layer in shape.layers]
    # The head and the MTP modules are on the stage of the last block.
    costs[-1] += shape.head.flops + shape.mtp * shape.mtp_module_flops
    ends = tuple(accumulate(layers)) or divide(costs, num_stages)
    specs = []
    for start, end in zip((0, *ends), ends, strict=False):
        last, share = end == config.num_layers, sum(costs[start:end]) / sum(costs)
        specs.append(StageSpec(range(start, end), start == 0, last, share, config.mtp_blocks if last else range(0)))
    return tuple(specs)


def divide(costs: Sequence[int], num_parts: int) -> tuple[int, ...]:
    """The end of each of `num_parts` consecutive parts of `costs`, so that the largest sum of a part is as small as
    possible. costs: positive. Example: [1, 1, 1, 3] in 2 parts -> (3, 4).

    For 2, 3 ... parts, finds the best division of the first costs from the divisions into one part less. The later
    the last part starts, the smaller its sum and the larger those of the others: bisection finds where they cross.
    """
    total = [0, *accumulate(costs)]
    best = {end: (total[end], (end,)) for end in range(1, len(costs) + 1)}  # end -> (largest sum, ends)
    for parts in range(2, num_parts + 1):
        shorter, best = best, {}
        for end in range(parts, len(costs) + 1):
            starts = range(parts - 1, end)  # of the last part
            equal = bisect_left(starts, True, key=lambda s: shorter[s][0] >= total[end] - total[s])
            near = starts[max(0, equal - 1) : equal + 1]
            largest = min(max(shorter[s][0], total[end] - total[s]) for s in near)
            first = bisect_left(starts, True, key=lambda s: total[end] - total[s] <= largest)
            last = bisect_right(starts, False, key=lambda s: shorter[s][0] > largest)
            best[end] = largest, (*min(shorter[s][1] for s in starts[first:last]), end)
    return best[len(costs)][1]
