"""The router: which experts each token goes to, and with what weight.

T tokens, D model dim, E experts, K experts per token.
"""

import torch
from torch import Tensor, nn

from moe_dualpipe.kernels.choose import Kernels
from moe_dualpipe.kernels.routing import route

from .config import ModelConfig
from .layers import Linear


class Router(nn.Module):
    """Top-k of softmax or sigmoid scores, computed in fp32 (kernels/routing.py).

    `load_E` counts the tokens that each expert was chosen for while training, until `take_load`.
    """

    load_E: Tensor

    def __init__(self, config: ModelConfig, kernels: Kernels = "auto"):
        super().__init__()
        self.config = config
        self.kernels: Kernels = kernels
        self.logits = Linear(config.hidden_size, config.num_experts, config.init_std)
        self.register_buffer("load_E", torch.zeros(config.num_experts, dtype=torch.int64), persistent=False)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights [T, K], which carry the gradient, and the expert ids [T, K], best first."""
        config = self.config
        return route(
            self.logits(x_TD), config.experts_per_token, score=config.router_score, num_groups=config.expert_groups,
            top_groups=config.top_groups, normalize=config.normalize_weights, scale=config.routed_scale,
            kernels=self.kernels,
        )  # fmt: skip

    def count(self, ids_TK: Tensor) -> None:
        """Count what was chosen: once for each decision, also where the decision is computed again in backward."""
        self.load_E.scatter_add_(0, ids_TK.flatten(), torch.ones_like(ids_TK.flatten()))

    def take_load(self) -> Tensor:
        """Return the counts [E] since the last call, and start again from zero."""
        load_E = self.load_E.clone()
        self.load_E.zero_()
        return load_E
