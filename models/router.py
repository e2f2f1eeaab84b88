"""The router: which experts each token is sent to, with what weight, and how the choices are kept balanced.

A bias for each expert balances the load. It is added to the scores to choose experts, but does not change the weights
(arXiv 2408.15664). After a step it rises a little for experts with less than the mean load and falls for those with
more. It has no gradient, so balancing does not change the direction of training. auxiliary_losses.py has losses that
also balance the load.

T tokens, S positions of a sequence, D model dim, E experts, K experts per token, L enabled losses.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from moe_dualpipe.kernels.backend import Kernels
from moe_dualpipe.kernels.fuse import is_traced
from moe_dualpipe.kernels.routing import route

from .auxiliary_losses import attach, loss_factors, router_losses
from .config import ModelConfig
from .context_parallel import Context
from .custom_layers import LayerClass, find_layer
from .layers import Linear


class RouterLayer(nn.Module):
    """The contract of a router, with its defaults. It chooses experts for each token, and weights for their outputs.

    Define a constructor and `forward`; everything else is optional. A plain nn.Module with these two works as well.

        def __init__(self, config): ...
        def forward(self, x): ...                       # returns weights_TK, ids_TK

    x: [..., S, D], where S is the length of a sequence; T is the product of all dimensions but D. ids_TK: int64, the
    global ids of the K experts of each token, from 0 to num_experts - 1, each at most once. -1 means no expert, so a
    token may have fewer than K experts, or none. K is at least 1, and need not be `config.experts_per_token`.
    weights_TK: the factors of the experts' outputs, finite, in fp32 or fp64. Gradients flow through the weights only.
    The weight of an id -1 has no effect on the output, and its gradient is 0. It must still be finite: in the backward
    of the router, 0 times infinity is NaN.

    All ranks have replicas of a router, with equal weights. Its decisions must depend only on `x`, the weights and
    buffers. A token's choice should not depend on other tokens: in generation, later ones do not exist yet.

    The constructor receives, if it has parameters of these names: `layer`, the number of the block, from 0; `kernels`,
    to pass to operators of `moe_dualpipe.kernels`; `options`, annotated with a dataclass (custom_layers.py).

    To add your own loss, return `attach(weights_TK, factor * loss)` as the weights (auxiliary_losses.py).
    """

    elementwise: Sequence[str] = ()
    """Parameters that Muon leaves to AdamW (layers.py)."""
    skips_choices: bool = True
    """Whether ids may be -1. Set it to False if they never are: this saves a host sync in each layer."""
    context: Context | None = None
    """Set by the model: the ranks that share each sequence; then S are this rank's positions (context_parallel.py)."""
    weights_BS: Tensor | None = None
    """Set for each call: the weight of each position in a mean over its sequence, 0 for padding. None: 1/S."""
    documents_BS: Tensor | None = None
    """Set for each call, with `weights_BS`: the number of the document of each position, -1 for padding; the means are
    then over documents. None: a sequence is one document."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError(f"{type(self).__name__} must define forward(x)")

    def move_bias(self, load_E: Tensor, rate: float) -> None:
        """Called after each update, unless `rate` (bias_rate of train.py) is 0. Default: does nothing.

        load_E: the number of tokens per expert on all ranks in this step. All replicas must stay equal: change only
        buffers, and compute the change only from `load_E`, `rate` and the buffers.
        """


class Router(RouterLayer):
    """Top-k of softmax or sigmoid scores, computed in fp32 (kernels/routing.py) from logits in `router_dtype`.

    `bias_E`, if configured, is added to the scores to choose experts; it is fp32 in a model of any dtype.
    """

    compiled: bool = False
    bias_E: Tensor | None
    skips_choices = False
    elementwise = ("logits.weight",)  # each row scores an expert, as a row of the head scores a token

    def __init__(self, config: ModelConfig, kernels: Kernels = "auto"):
        super().__init__()
        self.config = config
        self.kernels: Kernels = kernels
        fp32 = config.router_dtype == "float32"
        self.logits = Linear(config.hidden_size, config.num_experts, config.init_std, fp32)
        bias_E = torch.zeros(config.num_experts, dtype=torch.float32) if config.router_bias else None
        self.register_buffer("bias_E", bias_E)
        self.factors = loss_factors(config)

    def forward(self, x: Tensor, *replay_TK: Tensor) -> tuple[Tensor, ...]:
        """Return the weights [T, K], which carry the gradient, and the expert ids [T, K], best first.

        replay_TK: ids to take instead of the router's choice; the first of a token is -1 where it has none.
        x: [..., S, D]. For the losses, the last two dimensions are one sequence. If losses and gradients are enabled,
        the backward of the weights runs that of the losses too, and a third output has the values of the losses [L].
        """
        logits_TE = self.logits(x.flatten(0, -2))
        weights_TK, ids_TK = self.choose(logits_TE, self.bias_E, *replay_TK)
        if not (self.factors and torch.is_grad_enabled()):
            return weights_TK, ids_TK
        length = x.shape[-2]
        logits_BSE, ids_BSK = (rows.unflatten(0, (-1, length)) for rows in (logits_TE, ids_TK))
        losses = router_losses(
            self.config, logits_BSE, ids_BSK, self.weights_BS, self.context, self.documents_BS
        )  # fmt: skip
        weights_TK = attach(weights_TK, *(self.factors[name] * loss for name, loss in losses.items()))
        return weights_TK, ids_TK, torch.stack([loss.detach() for loss in losses.values()])

    def choose(
        self, logits_TE: Tensor, bias_E: Tensor | None, replay_TK: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        config = self.config
        return route(
            logits_TE, config.experts_per_token, score=config.router_score, bias_E=bias_E,
            num_groups=config.expert_groups, top_groups=config.top_groups, normalize=config.normalize_weights,
            scale=config.routed_scale, kernels=self.kernels, group_score=config.group_score,
            compiled=self.compiled, replay_TK=replay_TK,
        )  # fmt: skip

    @torch.no_grad()
    def move_bias(self, load_E: Tensor, rate: float) -> None:
        """Move each bias by `rate`: up if its expert's load is below the mean, down if above.

        load_E: the number of tokens per expert on all ranks, since the last call.

        Example: loads [3, 1, 2] and rate 0.1: the biases move by [-0.1, 0.1, 0].
        """
        if self.bias_E is None:
            return
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
    """The router "balanced", for measurements, chooses every expert equally often. The logits only give the weights.

    A token's experts are in `top_groups` groups and as far apart as possible, so on as many ranks as possible.
    """

    def choose(
        self, logits_TE: Tensor, bias_E: Tensor | None, replay_TK: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ids = balanced_ids.__wrapped__ if is_traced(logits_TE) else balanced_ids  # a cache is for tensors with values
        ids_TK = ids(self.config, len(logits_TE), logits_TE.device)
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


ROUTERS: dict[str, type[RouterLayer]] = {"topk": Router, "balanced": BalancedRouter}


def router_class(config: ModelConfig) -> LayerClass:
    """The router that `config` names. Raises ValueError for a class that does not fit."""
    optional = ["layer", "kernels"]
    return find_layer("router", str(config.router), ROUTERS, [("config",)], str(config.router_options), optional)


def build_router(config: ModelConfig, layer: int, kernels: Kernels = "auto") -> nn.Module:
    """The router of block `layer`. Raises ValueError for a class that does not fit."""
    router = router_class(config).build(config, layer=layer, kernels=kernels)
    if loss_factors(config) and not isinstance(router, Router):
        names = " and ".join(loss_factors(config))
        raise ValueError(f"{names} are losses of `Router`: derive {type(router).__name__} from it, or use 0")
    return router
