"""The router: which experts each token goes to, and with what weight; and what keeps its choices balanced.

The better part of that is a bias for each expert, on which its choice depends, and its weight does not: after a step
it goes up a little where an expert got less than the mean, and down where more (arXiv 2408.15664). It has no gradient,
so nothing pulls at the weights for the sake of balance. The rest are the losses of balance.py.

T tokens, S positions of a sequence, D model dim, E experts, K experts per token, L losses that are on.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn

from moe_dualpipe.kernels.backend import Kernels
from moe_dualpipe.kernels.routing import route

from .auxiliary import attach
from .balance import loss_factors, router_losses
from .config import ModelConfig
from .layers import Linear


class Router(nn.Module):
    """Top-k of softmax or sigmoid scores, computed in fp32 (kernels/routing.py).

    `bias_E`, where the configuration has one, is added to the scores to choose by; it is fp32 whatever the model is.
    `load_E` counts the tokens that each expert was chosen for while training, until `take_load`.
    """

    load_E: Tensor
    bias_E: Tensor | None

    def __init__(self, config: ModelConfig, kernels: Kernels = "auto"):
        super().__init__()
        self.config = config
        self.kernels: Kernels = kernels
        self.logits = Linear(config.hidden_size, config.num_experts, config.init_std)
        self.register_buffer("load_E", torch.zeros(config.num_experts, dtype=torch.int64), persistent=False)
        bias_E = torch.zeros(config.num_experts, dtype=torch.float32) if config.router_bias else None
        self.register_buffer("bias_E", bias_E)
        self.factors = loss_factors(config)
        self._losses: tuple[Tensor | float, int] = 0.0, 0  # their sum [L], and of how many decisions

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the weights [T, K], which carry the gradient, and the expert ids [T, K], best first.

        x: [..., S, D], of which the last two dimensions are one sequence to the losses. Where there are losses, and
        gradients are enabled, the backward of the weights is theirs, too, and their values [L] are a third output.
        """
        logits_TE = self.logits(x.flatten(0, -2))
        weights_TK, ids_TK = self.choose(logits_TE, self.bias_E)
        if not (self.factors and torch.is_grad_enabled()):
            return weights_TK, ids_TK
        length = x.shape[-2]
        losses = router_losses(self.config, logits_TE.unflatten(0, (-1, length)), ids_TK.unflatten(0, (-1, length)))
        weights_TK = attach(weights_TK, *(self.factors[name] * loss for name, loss in losses.items()))
        return weights_TK, ids_TK, torch.stack([loss.detach() for loss in losses.values()])

    def choose(self, logits_TE: Tensor, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weights and ids [T, K]."""
        config = self.config
        return route(
            logits_TE, config.experts_per_token, score=config.router_score, bias_E=bias_E,
            num_groups=config.expert_groups, top_groups=config.top_groups, normalize=config.normalize_weights,
            scale=config.routed_scale, kernels=self.kernels,
        )  # fmt: skip

    def count(self, ids_TK: Tensor, losses_L: Tensor | None = None) -> None:
        """Count what was chosen: once for each decision, also where the decision is computed again in backward."""
        self.load_E.scatter_add_(0, ids_TK.flatten(), torch.ones_like(ids_TK.flatten()))
        if losses_L is not None:
            total, decisions = self._losses
            self._losses = total + losses_L, decisions + 1

    def take_load(self) -> Tensor:
        """Return the counts [E] since the last call, and start again from zero."""
        load_E = self.load_E.clone()
        self.load_E.zero_()
        return load_E

    def take_losses(self) -> tuple[Tensor | float, int]:
        """Return the sum of the losses [L] since the last call, without their factors, and of how many decisions."""
        losses, self._losses = self._losses, (0.0, 0)
        return losses

    @torch.no_grad()
    def move_bias(self, load_E: Tensor, rate: float) -> None:
        """Move each bias by `rate`: up where the load is below its mean, down where above.

        load_E: how many tokens of all ranks chose each expert, since the last move.

        Example: loads [3, 1, 2] and rate 0.1: the biases move by [-0.1, 0.1, 0].
        """
        assert self.bias_E is not None
        missing_E = load_E.sum() - load_E * len(load_E)  # in integers, so that all replicas find the same
        self.bias_E.add_(missing_E.sign(), alpha=rate)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """As `.to(...)` and its like do it, but the bias stays fp32: beside one of 0.5, bf16 has no step of 0.001."""
        bias_E = self.bias_E
        super()._apply(fn, recurse)
        if bias_E is not None and self.bias_E is not None and self.bias_E.dtype != bias_E.dtype:
            self.bias_E = bias_E.to(self.bias_E.device)
        return self


class BalancedRouter(Router):
    """Chooses every expert equally often, whatever the logits say, which only weigh what was chosen: for measuring.

    The T x K choices are those of a perfectly trained router: a token's experts lie as far apart as possible, over as
    many ranks as there are, in `top_groups` of the groups.
    """

    def choose(self, logits_TE: Tensor, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
        ids_TK = balanced_ids(self.config, len(logits_TE), logits_TE.device)
        others_TE = torch.ones_like(logits_TE, dtype=torch.bool).scatter_(1, ids_TK, False)
        return super().choose(logits_TE.masked_fill(others_TE, -torch.inf), None)


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
