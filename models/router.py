"""The router: which experts each token is sent to, with what weight, and how the choices are kept balanced.

A bias for each expert balances the load. It is added to the scores to choose experts, but does not change the weights
(arXiv 2408.15664). After a step it rises a little for experts with less than the mean load and falls for those with
more. It has no gradient, so balancing does not change the direction of training. auxiliary_losses.py has losses that
also balance the load.

T tokens, S positions of a sequence, D model dim, E experts, K experts per token, L enabled losses.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn

from moe_dualpipe.kernels.backend import Kernels
from moe_dualpipe.kernels.routing import route

from .auxiliary_losses import attach, loss_factors, router_losses
from .config import ModelConfig
from .layers import Linear


class Router(nn.Module):
    """Top-k of softmax or sigmoid scores, computed in fp32 (kernels/routing.py) from logits in `router_dtype`.

    `bias_E`, if configured, is added to the scores to choose experts; it is fp32 in a model of any dtype.
    `load_E` counts the tokens of each expert in training since the last `take_load`.
    """

    load_E: Tensor
    bias_E: Tensor | None
    skips_choices = False  # whether ids may be -1, "no expert"
    elementwise = ("logits.weight",)  # its rows score experts, as those of the head score tokens

    def __init__(self, config: ModelConfig, kernels: Kernels = "auto"):
        super().__init__()
        self.config = config
        self.kernels: Kernels = kernels
        fp32 = config.router_dtype == "float32"
        self.logits = Linear(config.hidden_size, config.num_experts, config.init_std, fp32)
        self.register_buffer("load_E", torch.zeros(config.num_experts, dtype=torch.int64), persistent=False)
        bias_E = torch.zeros(config.num_experts, dtype=torch.float32) if config.router_bias else None
        self.register_buffer("bias_E", bias_E)
        self.factors = loss_factors(config)
        self._losses: tuple[Tensor | float, int] = 0.0, 0  # the sum of the losses [L], and the number of batches

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the weights [T, K], which carry the gradient, and the expert ids [T, K], best first.

        x: [..., S, D]. For the losses, the last two dimensions are one sequence. If losses and gradients are enabled,
        the backward of the weights runs that of the losses too, and a third output has the values of the losses [L].
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
        config = self.config
        return route(
            logits_TE, config.experts_per_token, score=config.router_score, bias_E=bias_E,
            num_groups=config.expert_groups, top_groups=config.top_groups, normalize=config.normalize_weights,
            scale=config.routed_scale, kernels=self.kernels,
        )  # fmt: skip

    def count(self, ids_TK: Tensor, losses_L: Tensor | None = None) -> None:
        """Add a batch to the load and the losses. Call it once per batch, also if routing is recomputed in backward.

        Choices of -1, no expert, are not counted.
        """
        ids = ids_TK.flatten()
        self.load_E.scatter_add_(0, ids.clamp(min=0), (ids >= 0).to(self.load_E.dtype))
        if losses_L is not None:
            total, batches = self._losses
            self._losses = total + losses_L, batches + 1

    def take_load(self) -> Tensor:
        """Return the number of this rank's tokens per expert [E] since the last call, and reset it."""
        load_E = self.load_E.clone()
        self.load_E.zero_()
        return load_E

    def take_losses(self) -> tuple[Tensor | float, int]:
        """Return the sum of the losses [L], without their factors, and the number of batches, since the last call."""
        losses, self._losses = self._losses, (0.0, 0)
        return losses

    @torch.no_grad()
    def move_bias(self, load_E: Tensor, rate: float) -> None:
        """Move each bias by `rate`: up if its expert's load is below the mean, down if above.

        load_E: the number of tokens per expert on all ranks, since the last call.

        Example: loads [3, 1, 2] and rate 0.1: the biases move by [-0.1, 0.1, 0].
        """
        assert self.bias_E is not None
        missing_E = load_E.sum() - load_E * len(load_E)  # integers, so that all replicas get the same result
        self.bias_E.add_(missing_E.sign(), alpha=rate)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Called by `.to(...)` and similar methods. Keeps the bias in fp32: near 0.5, bf16 has no step of 0.001."""
        bias_E = self.bias_E
        super()._apply(fn, recurse)
        if bias_E is not None and self.bias_E is not None and self.bias_E.dtype != bias_E.dtype:
            self.bias_E = bias_E.to(self.bias_E.device)
        return self


class BalancedRouter(Router):
    """A router for measurements that chooses every expert equally often. The logits only give the weights.

    A token's experts are in `top_groups` groups and as far apart as possible, so on as many ranks as possible.
    """

    def choose(self, logits_TE: Tensor, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
        ids_TK = balanced_ids(self.config, len(logits_TE), logits_TE.device)
        others_TE = torch.ones_like(logits_TE, dtype=torch.bool).scatter_(1, ids_TK, False)
        return super().choose(logits_TE.masked_fill(others_TE, -torch.inf), None)


@lru_cache(maxsize=8)  # without it, the host would wait for a copy to the GPU in every layer
def balanced_ids(config: ModelConfig, num_tokens: int, device: torch.device) -> Tensor:
    """Expert ids [T, K], round-robin: over E tokens each expert is chosen K times.

    Example: 2 of 4 experts -> [[0, 2], [1, 3], [2, 0], [3, 1]].
    """
    groups, k = config.expert_groups, config.experts_per_token
    in_group = config.num_experts // groups
    token_T1, choice_K = torch.arange(num_tokens)[:, None], torch.arange(k)
    group_TK = (token_T1 + choice_K % config.top_groups) % groups
    distance = in_group // -(-k // config.top_groups)
    ids_TK = group_TK * in_group + (token_T1 // groups + choice_K // config.top_groups * distance) % in_group
    return ids_TK.to(device)
