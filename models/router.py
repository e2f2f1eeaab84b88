"""The router: which experts each token goes to, and with what weight.

T tokens, D model dim, E experts, K experts per token.
"""

from functools import lru_cache

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
            self.scored(x_TD), config.experts_per_token, score=config.router_score, num_groups=config.expert_groups,
            top_groups=config.top_groups, normalize=config.normalize_weights, scale=config.routed_scale,
            kernels=self.kernels,
        )  # fmt: skip

    def scored(self, x_TD: Tensor) -> Tensor:
        """The logits [T, E] by which experts are chosen."""
        return self.logits(x_TD)

    def count(self, ids_TK: Tensor) -> None:
        """Count what was chosen: once for each decision, also where the decision is computed again in backward."""
        self.load_E.scatter_add_(0, ids_TK.flatten(), torch.ones_like(ids_TK.flatten()))

    def take_load(self) -> Tensor:
        """Return the counts [E] since the last call, and start again from zero."""
        load_E = self.load_E.clone()
        self.load_E.zero_()
        return load_E


class BalancedRouter(Router):
    """Chooses every expert equally often, whatever the logits say, which only weigh what was chosen: for measuring.

    The T x K choices are those of a perfectly trained router: a token's experts lie as far apart as possible, over as
    many ranks as there are, in `top_groups` of the groups.
    """

    def scored(self, x_TD: Tensor) -> Tensor:
        logits_TE = super().scored(x_TD)
        ids_TK = balanced_ids(self.config, len(x_TD), x_TD.device)
        others_TE = torch.ones_like(logits_TE, dtype=torch.bool).scatter_(1, ids_TK, False)
        return logits_TE.masked_fill(others_TE, -torch.inf)


@lru_cache(maxsize=8)  # a copy to a GPU would make the host wait for it, in every layer
def balanced_ids(config: ModelConfig, num_tokens: int, device: torch.device) -> Tensor:
    """Expert ids [T, K]: in turn, so that over E tokens each expert is chosen K times.

    Example: 2 of 4 experts -> [[0, 2], [1, 3], [2, 0], [3, 1]].
    """
    groups, k = config.expert_groups, config.experts_per_token
    in_group = config.num_experts // groups
    token_T1, choice_K = torch.arange(num_tokens)[:, None], torch.arange(k)
    group_TK = (token_T1 + choice_K % config.top_groups) % groups
    apart = in_group // -(-k // config.top_groups)
    ids_TK = group_TK * in_group + (token_T1 // groups + choice_K // config.top_groups * apart) % in_group
    return ids_TK.to(device)
