"""Refuse a run that cannot fit, before anything is allocated, and say which division does.

Weights, gradients and optimizer state are a lower bound: with Muon, one moment per parameter. Activations at the peak
of a step are predicted (tools/planner/peak.py), and counted with a margin, so that a run that fits is not refused.
They are not counted for custom attention and blocks, and with frozen parameters, with which less is saved. The ranks
exchange what they need and have, so all of them stop with the same message.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch.distributed as dist

from ..runtime.launch import Launch
from ..runtime.memory import free_gpu_memory, free_main_memory
from ..tools.planner.parameters import built_parameters
from .fitting import MARGIN, nearest_division, step_memory
from .freezing import is_frozen
from .plan import RunPlan

_ADVICE = "use a smaller model or more ranks, or --no-check-memory to start anyway"
_ACTIVATIONS = "activations"


@dataclass(frozen=True, slots=True)
class RankNeeds:
    """Bytes that a rank needs. copy: the copy of the state in main memory while a checkpoint is being written."""

    weights: int
    gradients: int
    optimizer: int
    copy: int
    activations: int = 0
    """Predicted, with what a backward needs for a moment; 0 if unknown."""

    @property
    def training(self) -> dict[str, int]:
        """The parts on the device, during a step."""
        parts = {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}
        return parts | ({_ACTIVATIONS: self.activations} if self.activations else {})

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
        return max(self.needs.training, self.needs.saving, key=_least)


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
        raise ValueError(problem.replace(_ADVICE, _division_that_fits(plan, ranks) or _ADVICE))


def _division_that_fits(plan: RunPlan, ranks: Sequence[RankMemory]) -> str:
    """The advice with the nearest division that fits; "" if there is none, or for layers whose memory is unknown."""
    members = Counter(rank.machine for rank in ranks)
    free = [
        rank.gpu_free if rank.gpu_free is not None or rank.main_free is None
        else rank.main_free // members[rank.machine] for rank in ranks
    ]  # fmt: skip
    known = [size for size in free if size is not None]
    with suppress(ValueError):
        if known and (found := nearest_division(plan.config, plan.setup, min(known))):
            return _ADVICE.replace("use ", f"use {found[0]}, which needs {_gib(found[1])} GiB on the fullest rank, ")
    return ""


def rank_needs(plan: RunPlan) -> RankNeeds:
    """The least memory that this rank needs."""
    config, layout, placement = plan.config, plan.setup.layout, plan.setup.schedule.placement
    own = built_parameters(
        config.model, plan.stages, placement, layout.pp_rank, layout.dp, layout.ep,
        lambda name: is_frozen(name, config.freeze),
    )  # fmt: skip
    owned = own.owned[layout.dp_rank] if config.parallel.zero else own.trained
    element, moments = plan.setup.dtype.itemsize, 4 if config.optim.name == "muon" else 8
    master = 4 if element < 4 else 0
    numbers = own.dense + own.experts
    copy = (4 + moments) * owned if config.checkpoint.save_async else 0
    activations = 0
    with suppress(ValueError):
        if own.trained == numbers:
            peak = step_memory(config, plan.setup)[layout.pp_rank]
            activations = peak.activations + peak.temporary
    return RankNeeds(element * numbers, 4 * own.trained, (master + moments) * owned, copy, activations)


def memory_problem(ranks: Sequence[RankMemory]) -> str:
    """Describe what does not fit, with the numbers and the options to change; "" if everything fits."""
    for number, rank in enumerate(ranks):
        if rank.gpu_free is not None and _least(rank.needs.training) > rank.gpu_free:
            return f"{_needs(number, rank.needs.training)}, and its GPU has {_gib(rank.gpu_free)} GiB free: {_ADVICE}"
    machines = defaultdict(list)
    for number, rank in enumerate(ranks):
        machines[rank.machine].append((_least(rank.main_parts), number, rank))
    for members in machines.values():
        free = [rank.main_free for _, _, rank in members if rank.main_free is not None]
        needed = sum(size for size, _, _ in members)
        if free and needed > min(free):
            _, number, rank = max(members, key=lambda member: member[0])
            together = f", all {len(members)} ranks of its machine {_gib(needed)} GiB" if len(members) > 1 else ""
            without_copy = [replace(member, needs=replace(member.needs, copy=0)) for _, _, member in members]
            fits = sum(_least(member.main_parts) for member in without_copy) <= min(free)
            advice = f"--no-save-async saves without a copy; otherwise {_ADVICE}" if fits else _ADVICE
            return (
                f"{_needs(number, rank.main_parts, ' of main memory')}{together}, and {_gib(min(free))} GiB are free: "
                f"{advice}"
            )
    return ""


def _least(parts: Mapping[str, int]) -> int:
    """The sum of the parts, with activations at the lower end of their prediction."""
    return sum(parts.values()) - round(MARGIN * parts.get(_ACTIVATIONS, 0))


def _needs(rank: int, parts: Mapping[str, int], where: str = "") -> str:
    """Example: rank 0 needs 4.0 GiB (weights 1.0, gradients 1.0, optimizer 2.0)."""
    listed = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())
    return f"rank {rank} needs {_gib(sum(parts.values()))} GiB{where} ({listed})"


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f}"
