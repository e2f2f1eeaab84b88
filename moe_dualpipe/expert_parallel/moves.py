"""Which experts to move between ranks, from the loads that were measured since the last time.

Moving an expert costs a transfer of its weights and optimizer state. So a layer is changed only if the highest
load of a rank falls enough, and new places are numbered so that as many experts as possible stay where they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..messages import plural
from .placement import ExpertPlacement, Loads, imbalance, place_experts


@dataclass(frozen=True, slots=True)
class Moves:
    """A new placement of experts, one in each slot. moved: number of experts that change rank.

    before, after: the highest load of a rank divided by the mean, for the measured loads: means over layers.
    """

    placement: ExpertPlacement
    moved: int
    before: float
    after: float

    def __str__(self) -> str:
        had = f"the busiest of {self.placement.num_gpus} ranks had {self.before:.2f} times the mean load"
        if not self.moved:
            return f"no expert moved: {had}"
        return f"{plural(self.moved, 'expert')} moved: {had}, and would have had {self.after:.2f}"


def plan_moves(old: ExpertPlacement, loads: Loads, gain: float = 0.0, num_nodes: int = 1, num_groups: int = 1) -> Moves:
    """Place the experts of each layer by their loads, where the highest load of a rank falls by the fraction `gain`.

    num_nodes, num_groups: as for `place_experts`. Raises ValueError as it does.
    """
    best = place_experts(loads, len(old.experts[0]), old.num_gpus, num_nodes, num_groups)
    near = [_stay(a, b, old.num_gpus, num_nodes) for a, b in zip(old.experts, best.experts, strict=True)]
    before, after = (
        imbalance(ExpertPlacement(tuple(rows), old.num_gpus).gpu_loads(loads)) for rows in (old.experts, near)
    )
    chosen = tuple(
        new if now * (1 - gain) > then else slots
        for slots, new, now, then in zip(old.experts, near, before, after, strict=True)
    )
    return between(old, ExpertPlacement(chosen, old.num_gpus), loads)


def between(old: ExpertPlacement, new: ExpertPlacement, loads: Loads) -> Moves:
    """The moves from one placement to another."""
    before, after = (imbalance(one.gpu_loads(loads)) for one in (old, new))
    per_gpu = len(old.experts[0]) // old.num_gpus
    moved = sum(
        a.index(expert) // per_gpu != b.index(expert) // per_gpu
        for a, b in zip(old.experts, new.experts, strict=True)
        for expert in a
    )
    return Moves(new, moved, sum(before) / len(before), sum(after) / len(after))


def _stay(old: Sequence[int], new: Sequence[int], num_gpus: int, num_nodes: int) -> tuple[int, ...]:
    """`new` with the GPUs of each node, and the slots of each GPU, numbered so that few experts move from `old`.

    Example for 2 GPUs: old 0 1 2 3, new 3 2 1 0: the GPUs are exchanged, and nothing moves.
    """
    size = len(old) // num_gpus
    before, after = ([{*row[i : i + size]} for i in range(0, len(row), size)] for row in (old, new))
    per_node = num_gpus // num_nodes
    pairs = [(len(before[a] & after[b]), a, b) for a in range(num_gpus) for b in range(num_gpus)
             if a // per_node == b // per_node]  # fmt: skip
    chosen: dict[int, int] = {}
    taken: set[int] = set()
    for _, a, b in sorted(pairs, key=lambda pair: (-pair[0], *pair[1:])):  # the largest overlap first
        if a not in chosen and b not in taken:
            chosen[a] = b
            taken.add(b)
    placed: list[int] = []
    for gpu in range(num_gpus):
        here = after[chosen[gpu]]
        arriving = iter(sorted(here - before[gpu]))
        placed += [expert if expert in here else next(arriving) for expert in old[gpu * size : (gpu + 1) * size]]
    return tuple(placed)
