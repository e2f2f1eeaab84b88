"""One transformer block: attention, then a dense MLP or experts, each on a normalised copy of the residual stream."""

import functools

import torch
from torch import Tensor, nn

from moe_dualpipe.expert_parallel import ExpertParallel
from moe_dualpipe.overlap import Arriving, Compute, Segmented, Segments

from .attention import Attention
from .config import ModelConfig
from .layers import SwiGLU
from .moe import MoE


class Block(Segmented):
    """Block number `layer` of the model; `seed` fixes the initial weights of its experts."""

    def __init__(self, config: ModelConfig, layer: int, expert_parallel: ExpertParallel, seed: int):
        super().__init__()
        out_std = config.residual_std
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config, out_std)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        if config.is_dense(layer):
            self.mlp = SwiGLU(config.hidden_size, config.dense_size, config.init_std, out_std)
        else:
            self.mlp = MoE(config, expert_parallel, seed, f"layers.{layer}")

    def segments(self, x_BSD: Tensor) -> Segments:
        parts = yield from self.parts(x_BSD)
        return (yield Compute("add", add_up, *parts))

    def parts(self, *parts: Tensor | Arriving) -> Segments:
        """The residual stream comes and goes in parts that are yet to be added up, so that none is waited for early."""
        if isinstance(self.mlp, MoE):
            h_BSD, x_TD, weights_TK, ids_TK = yield Compute("attn", self.attend_and_route, *parts)
            more = yield from self.mlp.exchange(x_TD, weights_TK, ids_TK)
            return h_BSD, *more
        h_BSD = yield Compute("attn", self.attend, *parts)
        y_BSD = yield Compute("mlp", self.dense_mlp, h_BSD)
        return h_BSD, y_BSD

    def attend(self, *parts: Tensor) -> Tensor:
        x_BSD = add_up(*parts)
        return x_BSD + self.attention(self.attention_norm(x_BSD))

    def attend_and_route(self, *parts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        h_BSD = self.attend(*parts)
        x_TD = self.mlp_norm(h_BSD).flatten(0, -2)
        return h_BSD, x_TD, *self.mlp.router(x_TD)  # type: ignore[union-attr]

    def dense_mlp(self, h_BSD: Tensor) -> Tensor:
        return self.mlp(self.mlp_norm(h_BSD))


def add_up(x_BSD: Tensor, *more: Tensor) -> Tensor:
    """The residual stream from its parts, which may be flattened to [T, D]; the first is added last."""
    return x_BSD + functools.reduce(torch.add, more).view_as(x_BSD) if more else x_BSD
