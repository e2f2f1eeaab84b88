"""Causal grouped-query attention with rotary positions, on torch's scaled_dot_product_attention, and its cache.

B sequences, S positions, D model dim, H query heads, G key/value heads, C head width. With a cache S are the new
positions, L all of them, past ones included, and N those that there is memory for.
"""

from collections.abc import Iterable
from typing import Self

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from .config import ModelConfig
from .layers import Linear, at_least_fp32


class KVCache:
    """Keys (rotated) and values of the positions so far, by layer: those of one micro-batch on one stage. Latent
    attention keeps something else, in one tensor with one head (`ModelConfig.kept`).

    `length` is how many positions that is. It moves on when a forward is through, so that all layers of a forward see
    the same past; set it back to forget the latest positions, to 0 for other sequences.

    New positions are written in place, and memory grows by `STEP` positions: token by token, one forward in so many
    copies the past, which attention reads in every one. A forward of one position needs no mask; one of several behind
    a past makes one, [S, L], which rules out the fastest kernels.
    """

    STEP = 256

    def __init__(self):
        self.length = 0
        self._layers: dict[int, Tensor] = {}  # [2, B, G, N, C] for keys and values

    @classmethod
    @torch.no_grad()
    def filled(
        cls,
        config: ModelConfig,
        layers: Iterable[int],
        batch: int,
        length: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """A cache of `length` positions of random normal numbers, to measure with."""
        cache = cls()
        tensors, heads, width = config.kept
        for layer in layers:
            cache.append(layer, *torch.randn(tensors, batch, heads, length, width, device=device, dtype=dtype))
        cache.length = length
        return cache

    def append(self, layer: int, *new_BGSC: Tensor) -> tuple[Tensor, ...]:
        """Write a layer's new keys and values behind the first `length`; returns each with the past, [B, G, L, C].

        Raises ValueError with gradients enabled, and for a layer or a shape other than those of the past.
        """
        if torch.is_grad_enabled():
            raise ValueError("a key/value cache keeps no gradients: call the stage under torch.no_grad()")
        batch, heads, new, width = new_BGSC[0].shape
        past, end = self.length, self.length + new
        kv = self._layers.get(layer) if past else new_BGSC[0].new_empty(len(new_BGSC), batch, heads, 0, width)
        if kv is None:
            raise ValueError(f"the cache has {past} positions of layers {[*self._layers]}: got layer {layer}")
        if (kept := [*kv.shape[1:3], kv.shape[4]]) != (got := [batch, heads, width]):
            raise ValueError(f"the cache has {past} positions of {kept} (sequences, heads, width): got {got}")
        if kv.shape[3] < end:
            short, room = kv, (end // self.STEP + 1) * self.STEP
            kv = self._layers[layer] = short.new_empty(len(short), batch, heads, room, width)
            kv[:, :, :, :past] = short[:, :, :, :past]
        for kept_BGNC, tensor_BGSC in zip(kv, new_BGSC, strict=True):
            kept_BGNC[:, :, past:end] = tensor_BGSC
        return kv[:, :, :, :end].unbind()


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245); `out_std` is the initial scale of the output projection.

    `layer` is the layer of a cache that is its own.
    """

    def __init__(self, config: ModelConfig, out_std: float, layer: int = 0):
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.rope_theta = config.rope_theta
        widths = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv = Linear(config.hidden_size, widths, config.init_std)
        keys = config.num_kv_heads * config.head_dim
        self.stacked = {"qkv.weight": (widths - 2 * keys, keys, keys)}
        self.q_norm, self.k_norm = (_head_norm(config, heads) for heads in (config.num_heads, config.num_kv_heads))
        self.out = Linear(config.num_heads * config.head_dim, config.hidden_size, out_std)

    def forward(self, x_BSD: Tensor, cache: KVCache | None = None, mask_B1SS: Tensor | None = None) -> Tensor:
        past, new = cache.length if cache is not None else 0, x_BSD.shape[1]
        heads = rearrange(self.qkv(x_BSD), "b s (h c) -> b h s c", c=self.head_dim)
        q_BHSC, k_BGSC, v_BGSC = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        cos_SC, sin_SC = rotary_table(at_least_fp32(x_BSD.new_empty(new)), self.head_dim, self.rope_theta, past)
        q_BHSC, k_BGSC = self.q_norm(q_BHSC), self.k_norm(k_BGSC)
        k_BGLC, v_BGLC = rotate(k_BGSC, cos_SC, sin_SC), v_BGSC
        if cache is not None:
            k_BGLC, v_BGLC = cache.append(self.layer, k_BGLC, v_BGLC)
        # is_causal lets the first query see the first key only, however many keys there are.
        seen = x_BSD.new_ones(new, past + new, dtype=torch.bool).tril(past) if past and new > 1 else mask_B1SS
        y_BHSC = F.scaled_dot_product_attention(
            rotate(q_BHSC, cos_SC, sin_SC), k_BGLC, v_BGLC, seen, is_causal=not past and seen is None, enable_gqa=True
        )
        return self.out(rearrange(y_BHSC, "b h s c -> b s (h c)"))


class JointNorm(nn.RMSNorm):
    """RMSNorm over all heads of a position together, [B, H, S, C]; weight: [H C]."""

    def forward(self, x: Tensor) -> Tensor:
        y_BSW = super().forward(rearrange(x, "b h s c -> b s (h c)"))
        return rearrange(y_BSW, "b s (h c) -> b h s c", h=x.shape[1])


def _head_norm(config: ModelConfig, heads: int) -> nn.Module:
    """What `ModelConfig.qk_norm` does to queries, or to keys, of so many heads."""
    if config.qk_norm == "none":
        return nn.Identity()
    if config.qk_norm == "head":
        return nn.RMSNorm(config.head_dim, config.norm_eps)
    return JointNorm(heads * config.head_dim, config.norm_eps)


def rotary_table(like_S: Tensor, head_dim: int, theta: float, start: int = 0) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i / head_dim), each [S, C], the C/2 angles repeated twice.

    `like_S` gives the length, device and dtype; positions count from `start`.
    """
    positions_S = torch.arange(start, start + len(like_S), device=like_S.device, dtype=like_S.dtype)
    frequencies = theta ** -(torch.arange(0, head_dim, 2, device=like_S.device, dtype=like_S.dtype) / head_dim)
    angles_SC = torch.outer(positions_S, frequencies).repeat(1, 2)
    return angles_SC.cos(), angles_SC.sin()


def rotate(x: Tensor, cos_SC: Tensor, sin_SC: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864) of [..., S, C], pairing channel i with i + C/2."""
    first, second = at_least_fp32(x).chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (at_least_fp32(x) * cos_SC + turned * sin_SC).to(x.dtype)
