"""One transformer block: attention, then a dense MLP or experts, each on a normalised copy of the residual stream."""

import functools
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_dualpipe.expert_parallel import ExpertParallel
from moe_dualpipe.kernels.backend import Kernels
from moe_dualpipe.overlap import Compute, Segmented, Segments
from moe_dualpipe.overlap.segment import CommResult

from .attention import Attention, KVCache
from .config import ModelConfig
from .latent_attention import LatentAttention
from .layers import SwiGLU
from .moe import MoE
from .recompute import RECOMPUTE, Recompute, forgetting, normalise


class Block(Segmented):
    """Block number `layer` of the model; `seed` fixes the initial weights of its experts.

    Raises ValueError for an unknown `recompute`.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        expert_parallel: ExpertParallel,
        seed: int,
        recompute: Recompute = "none",
        kernels: Kernels = "auto",
    ):
        super().__init__()
        if recompute not in RECOMPUTE:
            raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}: got {recompute!r}")
        self.recompute_attention = recompute in ("attention", "full")
        self.recompute_mlp = recompute == "full"
        # What is in a segment that is recomputed as a whole needs nothing of its own.
        self.forget_attention_norms, self.forget_mlp_norms = recompute == "norms", recompute in ("norms", "attention")
        out_std = config.residual_std
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        attention = LatentAttention if config.attention == "mla" else Attention
        self.attention = attention(config, out_std, layer)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        if config.is_dense(layer):
            self.mlp = SwiGLU(config.hidden_size, config.dense_size, config.init_std, out_std)
        else:
            self.mlp = MoE(config, expert_parallel, seed, f"layers.{layer}", recompute == "full", kernels)

    def segments(self, x_BSD: Tensor) -> Segments:
        parts = yield from self.parts(x_BSD)
        return (yield Compute("add", add_up, *parts))

    def parts(
        self, *parts: Tensor | CommResult, cache: KVCache | None = None, mask_B1SS: Tensor | None = None
    ) -> Segments:
        """The residual stream comes and goes in parts that are yet to be added up, so that none is waited for early.

        mask_B1SS: which positions each one attends to (documents.py), instead of all before it.
        """
        again = self.recompute_attention
        if isinstance(self.mlp, MoE):
            attend = partial(self.attend_and_route, cache=cache, mask_B1SS=mask_B1SS)
            h_BSD, x_TD, *decision = yield Compute("attn", attend, *parts, recompute=again)
            make_x = partial(self.mlp_norm, h_BSD.detach()) if self.forget_mlp_norms else None
            more = yield from self.mlp.exchange(x_TD, *decision, make_x=make_x)
            return h_BSD, *more
        attend = partial(self.attend, cache=cache, mask_B1SS=mask_B1SS)
        h_BSD = yield Compute("attn", attend, *parts, recompute=again)
        y_BSD = yield Compute("mlp", self.dense_mlp, h_BSD, recompute=self.recompute_mlp)
        return h_BSD, y_BSD

    def attend(self, *parts: Tensor, **seen: Any) -> Tensor:
        x_BSD = add_up(*parts)
        y_BSD, again = normalise(self.attention_norm, x_BSD, self.forget_attention_norms)
        with forgetting(y_BSD, again):
            return x_BSD + self.attention(y_BSD, **seen)

    def attend_and_route(self, *parts: Tensor, **seen: Any) -> tuple[Tensor, ...]:
        h_BSD = self.attend(*parts, **seen)
        x_BSD, again = normalise(self.mlp_norm, h_BSD, self.forget_attention_norms)
        with forgetting(x_BSD, again):
            return h_BSD, *self.mlp.route(x_BSD)  # type: ignore[union-attr]

    def dense_mlp(self, h_BSD: Tensor) -> Tensor:
        x_BSD, again = normalise(self.mlp_norm, h_BSD, self.forget_mlp_norms)
        with forgetting(x_BSD, again):
            return self.mlp(x_BSD)


def add_up(x_BSD: Tensor, *more: Tensor) -> Tensor:
    """The residual stream from its parts, which may be flattened to [T, D]; the first is added last."""
    return x_BSD + functools.reduce(torch.add, more).view_as(x_BSD) if more else x_BSD
