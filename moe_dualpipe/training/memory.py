"""Refuse a run whose weights, gradients and optimizer state cannot fit, before anything is allocated.

The estimate is a lower bound, so that a run that fits is never refused. It leaves out activations and buffers, and with
Muon it counts one moment per parameter. `moe-dualpipe model show` also estimates activations. The ranks exchange what
they need and have, so all of them stop with the same message.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch.distributed as dist

from ..planner.memory import ParameterSizes, owned_numbers, parameter_sizes
from ..runtime.launch import Launch
from ..runtime.memory import free_gpu_memory, free_main_memory
from .freezing import is_frozen
from .plan import RunPlan

_ADVICE = "use a smaller model or more ranks, or --no-check-memory to start anyway"


@dataclass(frozen=True, slots=True)
class RankNeeds:
    """Bytes that a rank needs. copy: the copy of the state in main memory while a checkpoint is being written."""

    weights: int
    gradients: int
    optimizer: int
    copy: int

    @property
    def training(self) -> dict[str, int]:
        """The parts on the device, during a step."""
        return {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}

    @property
    def saving(self) -> dict[str, int]:
        """The parts in main memory of a rank on the CPU, during a save. Gradients have been freed by then."""
        return {"weights": self.weights, "optimizer": self.optimizer, "copy for checkpoints": self.copy}


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What a rank needs and has. machine: the first rank on its machine. Free memory is None if unknown."""

    machine: int
    needs: RankNeeds
    main_free: int | None
    gpu_free: int | None
    """Also None on a CPU."""

    @property
    def main_parts(self) -> dict[str, int]:
        """What the rank needs of main memory at its peak."""
        if self.gpu_free is not None:
            return {"copy for checkpoints": self.needs.copy}
        return max(self.needs.training, self.needs.saving, key=lambda parts: sum(parts.values()))


def check_memory(plan: RunPlan, launch: Launch) -> None:
    """Raise ValueError on all ranks if a GPU or a machine has too little memory. Collective."""
    if not plan.config.health.check_memory:
        return
    device = plan.setup.device
    gpu_free = free_gpu_memory(device) if device.type == "cuda" else None
    needs = RankNeeds(0, 0, 0, 0)
    with suppress(Exception):  # a custom expert layer that does not work on the meta device
        needs = rank_needs(plan)
    own = RankMemory(launch.rank - launch.local_rank, needs, free_main_memory(), gpu_free)
    ranks = [own] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    if problem := memory_problem(ranks):
        raise ValueError(problem)


def rank_needs(plan: RunPlan) -> RankNeeds:
    """The least memory that this rank needs."""
    config, layout, placement = plan.config, plan.setup.layout, plan.setup.schedule.placement
    own = (plan.stages[index] for index in placement.stages[layout.pp_rank])
    sizes = ParameterSizes.of_rank(parameter_sizes(config.model, spec, layout.ep) for spec in own)
    chosen = {n: size for n, size in (sizes.dense | sizes.experts).items() if is_frozen(n, config.freeze)}
    sizes = sizes._replace(frozen=sizes.frozen | chosen)
    trained = owned = sum(sum(kind.values()) for kind in sizes.trained())
    if config.parallel.zero:
        owned = owned_numbers(sizes, placement, layout.pp_rank, layout.dp, layout.ep)[layout.dp_rank]
    element, moments = plan.setup.dtype.itemsize, 4 if config.optim.name == "muon" else 8
    master = 4 if element < 4 else 0
    weights = element * (sum(sizes.dense.values()) + sum(sizes.experts.values()))
    copy = (4 + moments) * owned if config.checkpoint.save_async else 0
    return RankNeeds(weights, 4 * trained, (master + moments) * owned, copy)


def memory_problem(ranks: Sequence[RankMemory]) -> str:
    """Describe what does not fit, with the numbers and the options to change; "" if everything fits."""
    for number, rank in enumerate(ranks):
        if rank.gpu_free is not None and sum(rank.needs.training.values()) > rank.gpu_free:
            return f"{_needs(number, rank.needs.training)}, and its GPU has {_gib(rank.gpu_free)} GiB free: {_ADVICE}"
    machines = defaultdict(list)
    for number, rank in enumerate(ranks):
        machines[rank.machine].append((sum(rank.main_parts.values()), number, rank))
    for members in machines.values():
        free = [rank.main_free for _, _, rank in members if rank.main_free is not None]
        needed = sum(size for size, _, _ in members)
        if free and needed > min(free):
            _, number, rank = max(members, key=lambda member: member[0])
            together = f", all {len(members)} ranks of its machine {_gib(needed)} GiB" if len(members) > 1 else ""
            without_copy = [replace(member, needs=replace(member.needs, copy=0)) for _, _, member in members]
            fits = sum(sum(member.main_parts.values()) for member in without_copy) <= min(free)
            advice = f"--no-save-async saves without a copy; otherwise {_ADVICE}" if fits else _ADVICE
            return (
                f"{_needs(number, rank.main_parts, ' of main memory')}{together}, and {_gib(min(free))} GiB are free: "
                f"{advice}"
            )
    return ""


def _needs(rank: int, parts: Mapping[str, int], where: str = "") -> str:
    """Example: rank 0 needs 4.0 GiB (weights 1.0, gradients 1.0, optimizer 2.0)."""
    listed = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())
    return f"rank {rank} needs {_gib(sum(parts.values()))} GiB{where} ({listed})"


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f}"
