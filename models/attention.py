"""Causal grouped-query attention with rotary positions, on torch's scaled_dot_product_attention.

B sequences, S positions, D model dim, H query heads, G key/value heads, C head width.
"""

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from .config import ModelConfig
from .layers import Linear, at_least_fp32


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245); `out_std` is the initial scale of the output projection."""

    def __init__(self, config: ModelConfig, out_std: float):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.rope_theta = config.rope_theta
        widths = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv = Linear(config.hidden_size, widths, config.init_std)
        self.out = Linear(config.num_heads * config.head_dim, config.hidden_size, out_std)

    def forward(self, x_BSD: Tensor) -> Tensor:
        heads = rearrange(self.qkv(x_BSD), "b s (h c) -> b h s c", c=self.head_dim)
        q_BHSC, k_BGSC, v_BGSC = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        cos_SC, sin_SC = rotary_table(at_least_fp32(x_BSD.new_empty(x_BSD.shape[1])), self.head_dim, self.rope_theta)
        y_BHSC = F.scaled_dot_product_attention(
            rotate(q_BHSC, cos_SC, sin_SC), rotate(k_BGSC, cos_SC, sin_SC), v_BGSC, is_causal=True, enable_gqa=True
        )
        return self.out(rearrange(y_BHSC, "b h s c -> b s (h c)"))


def rotary_table(like_S: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i / head_dim), each [S, C], the C/2 angles repeated twice.

    `like_S` gives the length, device and dtype.
    """
    positions_S = torch.arange(len(like_S), device=like_S.device, dtype=like_S.dtype)
    frequencies = theta ** -(torch.arange(0, head_dim, 2, device=like_S.device, dtype=like_S.dtype) / head_dim)
    angles_SC = torch.outer(positions_S, frequencies).repeat(1, 2)
    return angles_SC.cos(), angles_SC.sin()


def rotate(x: Tensor, cos_SC: Tensor, sin_SC: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864) of [..., S, C], pairing channel i with i + C/2."""
    first, second = at_least_fp32(x).chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (at_least_fp32(x) * cos_SC + turned * sin_SC).to(x.dtype)
