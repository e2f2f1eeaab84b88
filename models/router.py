"""The router: which experts each token goes to, and with what weight.

T tokens, D model dim, E experts, K experts per token.
"""

import torch
from torch import Tensor, nn

from .config import ModelConfig
from .layers import Linear, at_least_fp32


class Router(nn.Module):
    """Top-k of softmax (arXiv 1701.06538) or sigmoid (arXiv 2408.15664) scores, computed in fp32.

    `load_E` counts the tokens that each expert was chosen for while training, until `take_load`.
    """

    load_E: Tensor

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.logits = Linear(config.hidden_size, config.num_experts, config.init_std)
        self.register_buffer("load_E", torch.zeros(config.num_experts, dtype=torch.int64), persistent=False)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights [T, K], which carry the gradient, and the expert ids [T, K], best first."""
        logits_TE = at_least_fp32(self.logits(x_TD))
        scores_TE = logits_TE.softmax(-1) if self.config.router_score == "softmax" else logits_TE.sigmoid()
        weights_TK, ids_TK = scores_TE.topk(self.config.experts_per_token, dim=-1)
        if self.config.normalize_weights:
            # The guard is for sigmoid scores that have all underflowed to zero.
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        return weights_TK * self.config.routed_scale, ids_TK

    def count(self, ids_TK: Tensor) -> None:
        """Count what was chosen: once for each decision, also where the decision is computed again in backward."""
        self.load_E.scatter_add_(0, ids_TK.flatten(), torch.ones_like(ids_TK.flatten()))

    def take_load(self) -> Tensor:
        """Return the counts [E] since the last call, and start again from zero."""
        load_E = self.load_E.clone()
        self.load_E.zero_()
        return load_E
