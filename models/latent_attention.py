"""Multi-head latent attention: keys and values are computed from a narrow latent. A cache stores it and a rotated key.

Every head has its own keys and values, but all are linear maps of one normalized latent. A rotation by position does
not commute with such a map, so queries and keys have a second part that is rotated; all heads share the rotated key.

    expanded   compute keys and values of each head from the latent, then attend. Best if each key serves many queries.
    absorbed   map queries into the latent space, attend to the latents, and map the sums of latents to values. Best
               for a few queries after a long past: the keys and values of the past are never computed.

Both compute the same sum in a different order. `absorbed` is used for new positions after a past, `expanded` otherwise.

B sequences, S positions, D model dim, H heads, C width of a head's unrotated part, P of the rotated part, V of a head's
values, R of the latent, M = R + P, W = C + V. With a cache, S counts the new positions, and L all positions.
"""

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from moe_dualpipe.kernels.fuse import copy_compiled, fuse
from moe_dualpipe.kernels.linear import at_least_fp32

from .attention_layer import AttentionLayer
from .config import ModelConfig
from .kv_cache import KVCache
from .layers import Linear
from .rotary import Rotary, growth, rotate
from .sdpa import ScaledDotProduct, attend_slices
from .shape import AttentionShape


class LatentAttention(AttentionLayer):
    """Multi-head latent attention (arXiv 2405.04434). Arguments and static methods are those of `Attention`.

    A cache stores M numbers of a position: the latent and the rotated key.
    """

    compiled: bool = False

    def __init__(self, config: ModelConfig, layer: int = 0):
        super().__init__()
        self.layer = layer
        self.num_heads, self.head_dim, self.value_dim = config.num_heads, config.head_dim, config.value_dim
        self.kv_rank, self.rope_dim = config.kv_rank, config.rope_dim
        self.rotary, eps = Rotary(config.rope_dim, config), config.latent_norm_eps
        self.scale = (config.head_dim + config.rope_dim) ** -0.5 * growth(config, config.yarn_mscale_all_dim) ** 2
        queries = config.num_heads * (config.head_dim + config.rope_dim)
        self.q_width = config.q_rank or queries
        # One product gives the latent of queries (or the queries), the latent of keys and values, and the shared key.
        self.down = Linear(config.hidden_size, self.q_width + config.kv_rank + config.rope_dim, config.init_std)
        self.stacked = {"down.weight": (self.q_width, config.kv_rank, config.rope_dim)}
        self.published_rows = {"down.weight": (self.q_width, config.kv_rank + config.rope_dim)}
        latents = config.q_rank + config.kv_rank + config.rope_dim  # queries without a latent have no bias
        self.bias = nn.Parameter(torch.zeros(latents)) if config.qkv_bias else None
        self.q_norm = nn.RMSNorm(config.q_rank, eps) if config.q_rank else nn.Identity()
        self.q_up = Linear(config.q_rank, queries, config.init_std) if config.q_rank else nn.Identity()
        self.kv_norm = nn.RMSNorm(config.kv_rank, eps)
        self.kv_up = Linear(config.kv_rank, config.num_heads * (config.head_dim + config.value_dim), config.init_std)
        self.sdpa = ScaledDotProduct()
        self.out = Linear(
            config.num_heads * config.value_dim, config.hidden_size, config.residual_std, bias=config.out_bias
        )

    def forward(self, x_BSD: Tensor, cache: KVCache | None = None, mask_B1SS: Tensor | None = None) -> Tensor:
        past, new = cache.length if cache is not None else 0, x_BSD.shape[1]
        q_BSW, latent_BSR, k_BSP = self.project(x_BSD, past)
        angles = self.angles(new, past, like=x_BSD)
        cached = cache.append(self.layer, torch.cat([latent_BSR, k_BSP], dim=-1)[:, None]) if cache is not None else ()
        if past:
            y_BHSV = self.absorbed(*split_queries(q_BSW, *angles, self.num_heads), *cached)
        else:
            # Expanded: keys and values of each head.
            qkv = fuse(join_heads, self.compiled)(
                q_BSW, self.kv_up(latent_BSR), k_BSP, *angles, self.num_heads, self.value_dim
            )
            y_BHSV = self.sdpa(*qkv, mask_B1SS, is_causal=mask_B1SS is None, scale=self.scale)
        return self.out(rearrange(y_BHSV, "b h s v -> b s (h v)"))

    def project(self, x_BSD: Tensor, past: int = 0) -> tuple[Tensor, ...]:
        """Queries [B, S, H (C + P)], latents [B, S, R] and rotated keys [B, S, P]. Argument: see `Attention`."""
        angles = self.angles(x_BSD.shape[1], past, like=x_BSD)
        widths = self.q_width, self.kv_rank, self.rope_dim
        down_BSW = self.down(x_BSD)
        if self.bias is not None:
            down_BSW = down_BSW + F.pad(self.bias, (down_BSW.shape[-1] - len(self.bias), 0))
        q, latent_BSR, k_BSP = fuse(split_latents, self.compiled)(down_BSW, *angles, self.q_norm, self.kv_norm, widths)
        return self.q_up(q), latent_BSR, k_BSP

    def attend(self, q_BSW: Tensor, latent_BLR: Tensor, k_BLP: Tensor, mask_B1SS: Tensor | None = None) -> Tensor:
        """Only latents are gathered, R + P numbers of a position; keys and values are computed from them here."""
        assert self.context is not None
        angles = self.angles(q_BSW.shape[1], like=q_BSW)
        q, k, v = fuse(join_heads, self.compiled)(
            q_BSW, self.kv_up(latent_BLR), k_BLP, *angles, self.num_heads, self.value_dim
        )
        y_BHSV = attend_slices(self.sdpa, self.context, q, k, v, mask_B1SS, scale=self.scale)
        return self.out(rearrange(y_BHSV, "b h s v -> b s (h v)"))

    def angles(self, length: int, past: int = 0, *, like: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotary.table(at_least_fp32(like.new_empty(length)), past, self.context)

    def absorbed(self, q_BHSC: Tensor, q_BHSP: Tensor, cached_B1LM: Tensor) -> Tensor:
        """Attention of the last S of L positions to cached latents, without gradients: [B, H, S, V]."""
        up_HWR = rearrange(self.kv_up.merged_weight(), "(h w) r -> h w r", h=self.num_heads)
        up_HCR, up_HVR = up_HWR.split([self.head_dim, self.value_dim], dim=1)
        q = torch.cat([torch.einsum("bhsc,hcr->bhsr", q_BHSC, up_HCR), q_BHSP], dim=-1)
        new, length = q.shape[2], cached_B1LM.shape[2]
        if new == 1:
            # All heads see the same past. Passed as positions of one head, they read it once and nothing is copied.
            q, mask_SL = q.transpose(1, 2), None
        else:
            mask_SL = q.new_ones(new, length, dtype=torch.bool).tril(length - new)
        k = cached_B1LM.expand(-1, q.shape[1], -1, -1)
        y = self.sdpa(q, k, k[..., : self.kv_rank], mask_SL, scale=self.scale)
        y_BHSR = y.transpose(1, 2) if new == 1 else y
        return torch.einsum("bhsr,hvr->bhsv", y_BHSR, up_HVR)

    @staticmethod
    def shape(config: ModelConfig) -> AttentionShape:
        """The sizes that FLOPs, parameters and activations depend on, with expanded keys and values."""
        heads, width = config.num_heads, config.head_dim + config.rope_dim
        ranks = config.q_rank, config.kv_rank, config.rope_dim
        return AttentionShape("mla", heads, heads, width, config.value_dim, *ranks)

    @staticmethod
    def weight_flops(config: ModelConfig) -> int:
        return LatentAttention.shape(config).flops(config.hidden_size)

    @staticmethod
    def score_flops(config: ModelConfig, seq_len: int) -> int:
        return LatentAttention.shape(config).score_flops(seq_len)

    @staticmethod
    def kv_cache_shape(config: ModelConfig) -> tuple[int, int, int]:
        return 1, 1, config.kv_rank + config.rope_dim


def split_latents(
    down_BSW: Tensor, cos_SP: Tensor, sin_SP: Tensor, q_norm: nn.Module, kv_norm: nn.Module,
    widths: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The normalized latent of queries (or the queries), that of keys and values, and the rotated key."""
    q, latent_BSR, k_BSP = down_BSW.split(widths, dim=-1)
    return copy_compiled(q_norm(q)), kv_norm(latent_BSR), rotate(k_BSP, cos_SP, sin_SP)


def split_queries(q_BSW: Tensor, cos_SP: Tensor, sin_SP: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """The unrotated part of the queries, [B, H, S, C], and the rotated part, [B, H, S, P]."""
    heads, rotated = rearrange(q_BSW, "b s (h c) -> b h s c", h=num_heads), cos_SP.shape[1]
    q_BHSC, q_BHSP = heads.split([heads.shape[3] - rotated, rotated], dim=-1)
    return q_BHSC, rotate(q_BHSP, cos_SP, sin_SP)


def join_heads(
    q_BSW: Tensor, kv_BSW: Tensor, k_BSP: Tensor, cos_SP: Tensor, sin_SP: Tensor, num_heads: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys [B, H, S, C + P], and values [B, H, S, V]."""
    q_BHSC, q_BHSP = split_queries(q_BSW, cos_SP, sin_SP, num_heads)
    heads = rearrange(kv_BSW, "b s (h c) -> b h s c", h=num_heads)
    k_BHSC, v_BHSV = heads.split([heads.shape[3] - value_dim, value_dim], dim=-1)
    q = torch.cat([q_BHSC, q_BHSP], dim=-1)
    k = torch.cat([k_BHSC, k_BSP[:, None].expand(-1, num_heads, -1, -1)], dim=-1)
    return q, k, copy_compiled(v_BHSV)
