"""Causal grouped-query attention with rotary positions, the table of built-in attention, and masks for documents.

Each kind of attention is a class in the table `ATTENTION`, or your own (attention_layer.py). Its static methods return
its costs: FLOPs, and the shape of its key/value cache.

B sequences, S positions, D model dim, H query heads, G key/value heads, C head width. With a cache, S counts the new
positions, and L all positions.
"""

from collections.abc import Iterable

import torch
from einops import rearrange
from torch import Tensor, nn

from moe_dualpipe.kernels.fuse import copy_compiled, fuse
from moe_dualpipe.kernels.linear import at_least_fp32

from .attention_layer import AttentionLayer
from .config import ModelConfig
from .context_parallel import Context
from .custom_layers import LayerClass, find_layer
from .kv_cache import KVCache
from .latent_attention import LatentAttention
from .layers import Linear
from .rotary import Rotary, rotate
from .sdpa import ScaledDotProduct, attend_slices
from .shape import AttentionShape


class Attention(AttentionLayer):
    """Grouped-query attention (arXiv 2305.13245). layer: the index of this layer in a cache."""

    compiled: bool = False

    def __init__(self, config: ModelConfig, layer: int = 0):
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.rotary = Rotary(config.rotary_dim, config)
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv = Linear(config.hidden_size, queries + 2 * keys, config.init_std, bias=config.qkv_bias)
        self.stacked = {"qkv.weight": (queries, keys, keys)}
        self.q_norm, self.k_norm = (_head_norm(config, heads) for heads in (config.num_heads, config.num_kv_heads))
        self.sdpa = ScaledDotProduct()
        self.out = Linear(queries, config.hidden_size, config.residual_std, bias=config.out_bias)

    def forward(self, x_BSD: Tensor, cache: KVCache | None = None, mask_B1SS: Tensor | None = None) -> Tensor:
        past, new = cache.length if cache is not None else 0, x_BSD.shape[1]
        q_BHSC, k_BGLC, v_BGLC = self.project(x_BSD, past)
        if cache is not None:
            k_BGLC, v_BGLC = cache.append(self.layer, k_BGLC, v_BGLC)
        # is_causal aligns the first query with the first key, which is wrong after a past.
        mask = x_BSD.new_ones(new, past + new, dtype=torch.bool).tril(past) if past and new > 1 else mask_B1SS
        y_BHSC = self.sdpa(q_BHSC, k_BGLC, v_BGLC, mask, is_causal=not past and mask is None, enable_gqa=True)
        return self.out(rearrange(y_BHSC, "b h s c -> b s (h c)"))

    def project(self, x_BSD: Tensor, past: int = 0) -> tuple[Tensor, ...]:
        """Queries [B, H, S, C], keys and values [B, G, S, C] of the positions from `past`, or of the context."""
        angles = self.rotary.table(at_least_fp32(x_BSD.new_empty(x_BSD.shape[1])), past, self.context)
        split = fuse(split_heads, self.compiled)
        numbers = self.num_heads, self.num_kv_heads, self.head_dim
        return split(self.qkv(x_BSD), *angles, self.q_norm, self.k_norm, *numbers)

    def attend(self, q_BHSC: Tensor, k_BGLC: Tensor, v_BGLC: Tensor, mask_B1SS: Tensor | None = None) -> Tensor:
        assert self.context is not None
        y_BHSC = attend_slices(self.sdpa, self.context, q_BHSC, k_BGLC, v_BGLC, mask_B1SS, enable_gqa=True)
        return self.out(rearrange(y_BHSC, "b h s c -> b s (h c)"))

    @staticmethod
    def shape(config: ModelConfig) -> AttentionShape:
        """The sizes that FLOPs, parameters and activations depend on."""
        return AttentionShape("gqa", config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim)

    @staticmethod
    def weight_flops(config: ModelConfig) -> int:
        return Attention.shape(config).flops(config.hidden_size)

    @staticmethod
    def score_flops(config: ModelConfig, seq_len: int) -> int:
        return Attention.shape(config).score_flops(seq_len)

    @staticmethod
    def kv_cache_shape(config: ModelConfig) -> tuple[int, int, int]:
        """What a cache stores for a position in a layer: number of tensors, heads, and width."""
        return 2, config.num_kv_heads, config.head_dim


ATTENTION: dict[str, type[Attention | LatentAttention]] = {"gqa": Attention, "mla": LatentAttention}
"""The kinds of attention, by their names in `ModelConfig.attention`."""


def attention_class(config: ModelConfig) -> LayerClass:
    """The attention that `config` names. Raises ValueError for a class that does not fit."""
    return find_layer(
        "attention", str(config.attention), ATTENTION, [("config",)], str(config.attention_options), ["layer"]
    )


def attention_costs(config: ModelConfig) -> type[AttentionLayer]:
    """The class with the costs of the attention that `config` names. A module that defines none has the defaults."""
    found = ATTENTION.get(str(config.attention)) or attention_class(config).make
    return found if isinstance(found, type) and issubclass(found, AttentionLayer) else AttentionLayer


@torch.no_grad()
def filled_cache(
    config: ModelConfig, layers: Iterable[int], batch: int, length: int,
    device: torch.device | str | None = None, dtype: torch.dtype | None = None,
) -> KVCache:  # fmt: skip
    """A cache of `length` positions of random normal numbers, for measurements."""
    cache = KVCache()
    tensors, heads, width = attention_costs(config).kv_cache_shape(config)
    for layer in layers:
        cache.append(layer, *torch.randn(tensors, batch, heads, length, width, device=device, dtype=dtype))
    cache.length = length
    return cache


def split_heads(
    qkv_BSW: Tensor, cos_SC: Tensor, sin_SC: Tensor, q_norm: nn.Module, k_norm: nn.Module, num_heads: int,
    num_kv_heads: int, head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The queries [B, H, S, C] and keys [B, G, S, C], normalized and rotated, and values [B, G, S, C]."""
    heads = rearrange(qkv_BSW, "b s (h c) -> b h s c", c=head_dim)
    q_BHSC, k_BGSC, v_BGSC = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    q_BHSC, k_BGSC = rotate(q_norm(q_BHSC), cos_SC, sin_SC), rotate(k_norm(k_BGSC), cos_SC, sin_SC)
    return q_BHSC, k_BGSC, copy_compiled(v_BGSC)


class JointNorm(nn.RMSNorm):
    """RMSNorm over all heads of a position together, [B, H, S, C]; weight: [H C]."""

    def forward(self, x: Tensor) -> Tensor:
        y_BSW = super().forward(rearrange(x, "b h s c -> b s (h c)"))
        return rearrange(y_BSW, "b s (h c) -> b h s c", h=x.shape[1])


def _head_norm(config: ModelConfig, heads: int) -> nn.Module:
    """The norm that `ModelConfig.qk_norm` selects, for `heads` query heads or key heads."""
    if config.qk_norm == "none":
        return nn.Identity()
    if config.qk_norm == "head":
        return nn.RMSNorm(config.head_dim, config.norm_eps)
    return JointNorm(heads * config.head_dim, config.norm_eps)


def document_mask(documents_BS: Tensor, context: Context | None = None) -> Tensor:
    """Whether a position attends to another: to the same document, and not to later positions. [B, 1, S, S] bool.

    context: keep only the rows of this rank's positions. Rotary positions are relative, so attention does not depend on
    where in the sequence a document starts.
    """
    same_BSS = documents_BS[:, :, None] == documents_BS[:, None, :]
    mask_B1SS = same_BSS.tril()[:, None]
    return mask_B1SS if context is None else context.cut(mask_B1SS, 2)
