"""Expert load balancing: the loads of the routers, the update of their biases, and the mean of the auxiliary losses.

A router counts only the tokens of its own rank. Biases are updated from the sum over all ranks, so all replicas of a
layer make the same update and stay bit-equal, under any schedule.

L layers with experts, E experts.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..expert_parallel.gather import sum_over_ranks
from ..models import MoE, TransformerStage
from ..models.auxiliary_losses import loss_factors
from ..models.config import ModelConfig
from ..runtime.memory import queue_copy
from ..runtime.shared_errors import gather_objects


class Balance:
    """The Mixture-of-Experts layers of this rank's stages. Collective."""

    def __init__(self, model: ModelConfig, stages: Mapping[int, TransformerStage], rate: float):
        self.rate, self.losses = rate, [*loss_factors(model)]
        modules = (module for stage in stages.values() for module in stage.modules())
        self.layers = {module.layer: module for module in modules if isinstance(module, MoE)}
        blocks = sorted({block for of_rank in gather_objects([*self.layers]) for block in of_rank})
        self.rows = {block: row for row, block in enumerate(blocks)}  # custom blocks may have experts in any layer
        self.shape = len(blocks), model.num_experts
        self._since_save_LE = torch.zeros(self.shape, dtype=torch.int64)
        self._maxima_L = torch.zeros(len(blocks), dtype=torch.float64)  # sums over the steps since then
        self._steps = 0

    def loads(self, device: torch.device) -> Tensor:
        """Tokens per expert since the last call, summed over all ranks, [L, E]. Collective."""
        load_LE = torch.zeros(self.shape, dtype=torch.int64, device=device)
        for layer, moe in self.layers.items():
            load_LE[self.rows[layer]] += moe.take_load()
        load_LE = sum_over_ranks(load_LE.cpu())
        self._since_save_LE += load_LE
        if load_LE.any():
            self._maxima_L += (load_LE.max(1).values / load_LE.double().mean(1)).nan_to_num(1.0)
            self._steps += 1
        return load_LE

    def forget(self) -> None:
        """Forget the tokens and losses that the layers have counted since the last step."""
        for moe in self.layers.values():
            moe.take_load()
            moe.take_losses()

    def take_loads(self) -> tuple[list[int], Tensor, Tensor]:
        """The layers with experts, their loads of all steps since the last call, [L, E], and the largest load of an
        expert divided by the mean of its layer, as a mean over these steps, [L]."""
        load_LE, self._since_save_LE = self._since_save_LE, torch.zeros_like(self._since_save_LE)
        maxima_L = self._maxima_L / max(1, self._steps)
        self._maxima_L, self._steps = torch.zeros_like(maxima_L), 0
        return [*self.rows], load_LE, maxima_L

    def after_step(self, load_LE: Tensor, device: torch.device, move: bool = True) -> dict[str, float]:
        """Update the biases from `loads()` of this step. Returns the mean of each auxiliary loss. Collective.

        move: False for a skipped step, which changes no bias.
        """
        if move and self.rate:
            load_LE = queue_copy(load_LE, device)
            for layer, moe in self.layers.items():
                if move_bias := getattr(moe.router, "move_bias", None):
                    move_bias(load_LE[self.rows[layer]], self.rate)
        return self._mean_losses(device) if self.losses else {}

    def _mean_losses(self, device: torch.device) -> dict[str, float]:
        """Mean over layers, micro-batches and ranks, without the factors."""
        totals = torch.zeros(len(self.losses) + 1, dtype=torch.float64, device=device)
        for moe in self.layers.values():
            losses_L, decisions = moe.take_losses()
            totals[:-1] += losses_L
            totals[-1] += decisions
        *sums, decisions = sum_over_ranks(totals.cpu()).tolist()
        if not decisions:  # all layers are dense
            return {}
        return {name: round(total / decisions, 6) for name, total in zip(self.losses, sums, strict=True)}
