"""The Mixture-of-Experts layer: route, dispatch, experts, combine, and the shared expert beside them.

T tokens, D model dim, K experts per token, N received rows, M rows in expert-major order.
"""

import torch
from torch import Tensor, nn

from moe_dualpipe.expert_parallel import ExpertParallel, Route, combine, dispatch
from moe_dualpipe.kernels.permute import gather_rows, sum_rows

from .config import ModelConfig
from .experts import expert_class
from .layers import SwiGLU
from .router import Router
from .seeding import seeded


class MoE(nn.Module):
    """Routed experts, spread over ranks by `expert_parallel`, plus shared experts on every rank.

    `seed` and `name` fix the initial weights of each expert, wherever it lives.
    """

    def __init__(self, config: ModelConfig, expert_parallel: ExpertParallel, seed: int, name: str):
        super().__init__()
        self.expert_parallel = expert_parallel
        self.router = Router(config)
        local = expert_parallel.local_experts
        with seeded(seed, f"{name}.experts.{local.start}"):
            self.experts = expert_class(config.experts)(config, len(local))
        if reset := getattr(self.experts, "reset_expert", None):
            for e, expert in enumerate(local):
                with seeded(seed, f"{name}.experts.{expert}"):
                    reset(e)
        self.shared = None
        if config.num_shared_experts:
            inner = config.num_shared_experts * config.expert_size
            self.shared = SwiGLU(config.hidden_size, inner, config.init_std, config.residual_std)

    def forward(self, x: Tensor) -> Tensor:
        x_TD = x.flatten(0, -2)
        weights_TK, ids_TK = self.router(x_TD)
        route = self.expert_parallel.prepare(ids_TK)
        x_ND, weights_M = dispatch(x_TD, weights_TK, route, self.expert_parallel)
        y_TD = combine(self.run_experts(x_ND, weights_M, route), route, self.expert_parallel)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        return y_TD.view_as(x)

    def run_experts(self, x_ND: Tensor, weights_M: Tensor, route: Route) -> Tensor:
        """Received rows [N, D] -> the weighted sum of what this rank's experts make of each, [N, D]."""
        order = route.order
        rows_MD = gather_rows(x_ND, order.gather_idx_M, order.positions_NK)
        out_MD = self.experts(rows_MD, order.expert_offsets)
        if out_MD.shape != rows_MD.shape:
            raise ValueError(
                f"{type(self.experts).__name__} must map rows {[*rows_MD.shape]} to rows of the same shape: "
                f"got {[*out_MD.shape]}"
            )
        weighted_MD = (out_MD * weights_M[:, None]).to(out_MD.dtype)  # the weights are fp32
        return sum_rows(weighted_MD, order.gather_idx_M, order.positions_NK)

    def take_load(self) -> Tensor:
        """Tokens per expert [E] that this rank's tokens chose since the last call."""
        return self.router.take_load()


def expert_loads(module: nn.Module) -> Tensor | None:
    """Tokens per expert since the last call, [MoE layers, E]; None for a module without Mixture-of-Experts layers."""
    loads = [layer.take_load() for layer in module.modules() if isinstance(layer, MoE)]
    return torch.stack(loads) if loads else None
