"""Which rank holds which expert: as an option says at the start, and by measured loads during the run.

The decisions follow from the loads of all ranks, so all ranks make the same without asking each other. The rest of a
run knows experts by their ids: the router, its bias and the loads, and the tensors of checkpoints (`by_expert`).

E experts, L layers with experts.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.expert_loads import LOADS_FILE, read_loads, read_placement
from ...expert_parallel.moves import plan_moves
from ...expert_parallel.placement import Placement, count_nodes, imbalance, in_order
from ...expert_parallel.shared import find_machine
from ...models.build_experts import expert_class
from ...models.expert_slots import names_by_expert
from ...models.layer_class import named_parameters
from ...runtime.shared_errors import build_on_all_ranks, gather_objects
from ..config import ParallelConfig
from ..pipeline import Pipeline
from . import Extension, Update
from .slot_transfer import SlotTransfer, check_alike


class ExpertMoves(Extension):
    """The places of the experts of all layers. Collective.

    Raises ValueError, on all ranks, for expert layers whose experts cannot move, and for a file or a checkpoint of
    `place_experts` that cannot be used.
    """

    def __init__(self, trainer: Any):
        pipeline, self.options = trainer.pipeline, trainer.config.parallel
        self.pipeline, self.balance, self.progress = pipeline, pipeline.balance, trainer.progress
        build_on_all_ranks(self._check)
        self.transfer = SlotTransfer(pipeline.stages.values(), pipeline.layout, pipeline.groups, trainer.optimizer)
        self.placement = in_order(len(self.balance.rows), pipeline.model.num_experts, pipeline.layout.ep)
        self.shape = _count_machines(pipeline), pipeline.model.expert_groups
        self._load_LE = torch.zeros(self.balance.shape, dtype=torch.int64)  # since the last decision
        if source := self.options.place_experts:
            placement, self.start = build_on_all_ranks(lambda: self._chosen(source, trainer.run.resume))
            self._move(placement)

    @staticmethod
    def wanted(options: ParallelConfig) -> bool:
        return bool(options.place_experts or options.move_experts_every)

    def after_update(self, update: Update) -> None:
        """Count the loads of a step, and move experts if it is time."""
        with self.progress.during("moves of experts"):
            self._load_LE += update.loads_LE
            ranks_L = imbalance(self.placement.gpu_loads(update.loads_LE.tolist()))
            update.record["rank_load_max_over_mean"] = round(sum(ranks_L) / len(ranks_L), 4)
            if not (every := self.options.move_experts_every) or (update.step + 1) % every:
                return
            moves = plan_moves(self.placement, self._load_LE.tolist(), self.options.move_experts_gain, *self.shape)
            self._move(moves.placement)
        self._load_LE.zero_()
        update.notes.append(f"step {update.step + 1}: {moves}")
        measured = {"rank_load_before": round(moves.before, 4), "rank_load_after": round(moves.after, 4)}
        update.record |= {"moved_experts": moves.moved, **measured}

    def state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """`state` by names with the ids of experts, instead of the numbers of the slots that they are in."""
        experts = dict(zip(self.balance.rows, self.placement.experts, strict=True))
        names = {slot: name for slot, name, _ in names_by_expert(self.pipeline.stages.values(), experts)}
        parts = ((name.partition("."), tensor) for name, tensor in state.items())
        return {f"{kind}{dot}{names.get(name, name)}": tensor for (kind, dot, name), tensor in parts}

    def _move(self, new: Placement) -> None:
        changed = {}
        for layer, old_S, new_S in zip(self.balance.rows, self.placement.experts, new.experts, strict=True):
            if old_S != new_S:
                slot_of = {expert: slot for slot, expert in enumerate(old_S)}
                changed[layer] = [slot_of[expert] for expert in new_S]
        self.transfer.move(changed)
        for layer, experts_S in zip(self.balance.rows, new.experts, strict=True):
            if layer in self.balance.layers:
                self.balance.layers[layer].place(experts_S)
        self.placement = new

    def _check(self) -> None:
        model = self.pipeline.model
        if not self.balance.rows:
            raise ValueError("this model has no experts to place: leave out place_experts and move_experts_every")
        if {"expert_id", "expert_ids"} & named_parameters(expert_class(model).make):
            raise ValueError(
                f"the experts {model.experts!r} are built for their ids, so they cannot move to other ranks"
            )
        check_alike(self.pipeline.stages.values(), str(model.experts))

    def _chosen(self, source: str, resume: Path | None) -> tuple[Placement, str]:
        layers, num_experts, ep = [*self.balance.rows], self.pipeline.model.num_experts, self.pipeline.layout.ep
        if source == "auto":
            file = resume and resume / LOADS_FILE
            if not file or not file.is_file():
                what = f"place_experts auto needs the loads of a checkpoint, and {resume or 'a new run'} has none"
                raise ValueError(f"{what}: use move_experts_every, or a file")
            saved, loads = read_loads(file)
            if saved != layers or any(len(row) != num_experts for row in loads):
                raise ValueError(f"place_experts auto: {file} has the loads of another model")
            moves = plan_moves(self.placement, loads, 0.0, *self.shape)
            return moves.placement, str(moves)
        saved, placement = read_placement(Path(source))
        check_placement(f"place_experts {source}", saved, placement, layers, num_experts, ep)
        return placement, f"experts placed on {ep} ranks by {source}"


def check_placement(
    name: str, saved: list[int], placement: Placement, layers: list[int], num_experts: int, ep: int
) -> None:
    """Raise ValueError unless a placement, of the layers `saved`, fits these layers. name: what messages call it."""
    if placement.num_gpus != ep:
        raise ValueError(f"{name} is for {placement.num_gpus} GPUs, and ep is {ep}: make it with --gpus {ep}")
    if saved != layers or any({*row} != {*range(num_experts)} for row in placement.experts):
        have = f"{num_experts} experts in layers {', '.join(map(str, layers))}"
        raise ValueError(f"{name} is for another model: this one has {have}")
    if (slots := len(placement.experts[0])) != num_experts:
        raise ValueError(
            f"{name} has {slots} slots for {num_experts} experts, and training uses no copies: make it with "
            f"--slots {num_experts}"
        )


def _count_machines(pipeline: Pipeline) -> int:
    """The machines that each expert group covers, if each has the same number of consecutive ranks; otherwise 1."""
    machines = gather_objects(find_machine(), pipeline.groups.experts)
    counts = {*gather_objects(count_nodes(machines))}
    return counts.pop() if len(counts) == 1 else 1
