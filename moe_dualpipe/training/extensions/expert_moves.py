"""Which rank holds which expert, decided by measured loads during the run (`parallel.move_experts_every`).

The decisions follow from the loads of all ranks, so all ranks make the same without asking each other. The rest of a
run knows experts by their ids: the router, its bias and the loads, and the tensors of checkpoints (`by_expert`).

E experts, L layers with experts.
"""

import torch
from torch import Tensor

from ...checkpoint.load import load_saved
from ...expert_parallel.moves import plan_moves
from ...expert_parallel.placement import ExpertPlacement, count_nodes, imbalance, in_order
from ...expert_parallel.rank_facts import find_machine
from ...models.build_experts import expert_class
from ...models.custom_layers import named_parameters
from ...models.expert_slots import names_by_expert
from ...pipeline.pipeline import Pipeline
from ...pipeline.slot_transfer import SlotTransfer, check_alike
from ...runtime.shared_errors import build_on_all_ranks, gather_objects
from . import Extension, Trained, Update


class ExpertMoves(Extension):
    """The places of the experts of all layers. Collective.

    Raises ValueError, on all ranks, for expert layers whose experts cannot move.
    """

    def __init__(self, trainer: Trained):
        pipeline, self.options = trainer.pipeline, trainer.config.parallel
        self.pipeline, self.balance, self.progress = pipeline, pipeline.balance, trainer.progress
        build_on_all_ranks(self._check)
        self.transfer = SlotTransfer(pipeline.stages.values(), pipeline.layout, pipeline.groups, trainer.optimizer)
        self.placement = in_order(len(self.balance.rows), pipeline.model.num_experts, pipeline.layout.ep)
        self.shape = _count_machines(pipeline), pipeline.model.expert_groups
        self._load_LE = torch.zeros(self.balance.shape, dtype=torch.int64)  # since the last decision
        saved = self._own_state()
        resumed = trainer.run.start.resume
        if resumed and load_saved(resumed, saved):  # a run without moves has not saved them
            slots = tuple(map(tuple, saved["expert_slots"].tolist()))
            self._move(ExpertPlacement(slots, pipeline.layout.ep))

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
        named = {f"{kind}{dot}{names.get(name, name)}": tensor for (kind, dot, name), tensor in parts}
        return named | self._own_state()

    def _own_state(self) -> dict[str, Tensor]:
        """The expert in each slot, and the loads since the last decision, both [L, E]."""
        return {"expert_slots": torch.tensor(self.placement.experts), "expert_loads": self._load_LE}

    def _move(self, new: ExpertPlacement) -> None:
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
            raise ValueError("this model has no experts to move: leave out move_experts_every")
        if {"expert_id", "expert_ids"} & named_parameters(expert_class(model).make):
            raise ValueError(
                f"the experts {model.experts!r} are built for their ids, so they cannot move to other ranks"
            )
        check_alike(self.pipeline.stages.values(), str(model.experts))


def _count_machines(pipeline: Pipeline) -> int:
    """The machines that each expert group covers, if each has the same number of consecutive ranks; otherwise 1."""
    machines = gather_objects(find_machine(), pipeline.groups.experts)
    counts = {*gather_objects(count_nodes(machines))}
    return counts.pop() if len(counts) == 1 else 1
