"""Multi-head latent attention: keys and values are made of a narrow latent, and a cache keeps no more than that.

Every head has keys and values of its own, but all are linear maps of one normalised latent. A rotation by position does
not go through such a map, so queries and keys have a second part that is rotated; the keys' one is shared by all heads.

    expanded   keys and values are made of the latent, and attended to as ever: right where each serves many queries
    absorbed   queries are mapped into the latent space instead, where they meet the latents themselves, and sums of
               latents become values afterwards: right for a few queries behind a long past, of which nothing is made

Both are the same sum in another order. New positions behind a past are absorbed, all others expanded.

B sequences, S positions, D model dim, H heads, C width of a head's unrotated part, P of the rotated one, V of a head's
values, R of the latent, M = R + P, W = C + V. Behind a past S are the new positions, and L all of them.
"""

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import KVCache, rotary_table, rotate
from .config import ModelConfig
from .layers import Linear, at_least_fp32


class LatentAttention(nn.Module):
    """Multi-head latent attention (arXiv 2405.04434); `out_std` is the initial scale of the output projection.

    `layer` is the layer of a cache that is its own. It keeps M numbers of a position: the normalised latent, then the
    rotated key.
    """

    def __init__(self, config: ModelConfig, out_std: float, layer: int = 0):
        super().__init__()
        self.layer = layer
        self.num_heads, self.head_dim, self.value_dim = config.num_heads, config.head_dim, config.value_dim
        self.kv_rank, self.rope_dim, self.rope_theta = config.kv_rank, config.rope_dim, config.rope_theta
        self.scale = (config.head_dim + config.rope_dim) ** -0.5
        queries = config.num_heads * (config.head_dim + config.rope_dim)
        self.q_width = config.q_rank or queries
        # One product: the latent of queries (or queries), the latent of keys and values, the shared key.
        self.down = Linear(config.hidden_size, self.q_width + config.kv_rank + config.rope_dim, config.init_std)
        self.stacked = {"down.weight": (self.q_width, config.kv_rank, config.rope_dim)}
        self.q_norm = nn.RMSNorm(config.q_rank, config.norm_eps) if config.q_rank else nn.Identity()
        self.q_up = Linear(config.q_rank, queries, config.init_std) if config.q_rank else nn.Identity()
        self.kv_norm = nn.RMSNorm(config.kv_rank, config.norm_eps)
        self.kv_up = Linear(config.kv_rank, config.num_heads * (config.head_dim + config.value_dim), config.init_std)
        self.out = Linear(config.num_heads * config.value_dim, config.hidden_size, out_std)

    def forward(self, x_BSD: Tensor, cache: KVCache | None = None, mask_B1SS: Tensor | None = None) -> Tensor:
        past, new = cache.length if cache is not None else 0, x_BSD.shape[1]
        q, latent_BSR, k_BSP = self.down(x_BSD).split([self.q_width, self.kv_rank, self.rope_dim], dim=-1)
        heads = rearrange(self.q_up(self.q_norm(q)), "b s (h c) -> b h s c", h=self.num_heads)
        q_BHSC, q_BHSP = heads.split([self.head_dim, self.rope_dim], dim=-1)
        angles = rotary_table(at_least_fp32(x_BSD.new_empty(new)), self.rope_dim, self.rope_theta, past)
        latent_BSR, k_BSP, q_BHSP = self.kv_norm(latent_BSR), rotate(k_BSP, *angles), rotate(q_BHSP, *angles)
        kept = ()
        if cache is not None:
            kept = cache.append(self.layer, torch.cat([latent_BSR, k_BSP], dim=-1)[:, None])
        if past:
            y_BHSV = self.absorbed(q_BHSC, q_BHSP, *kept)
        else:
            y_BHSV = self.expanded(q_BHSC, q_BHSP, latent_BSR, k_BSP, mask_B1SS)
        return self.out(rearrange(y_BHSV, "b h s v -> b s (h v)"))

    def expanded(
        self, q_BHSC: Tensor, q_BHSP: Tensor, latent_BSR: Tensor, k_BSP: Tensor, mask_B1SS: Tensor | None = None
    ) -> Tensor:
        """Attention without a past, by keys and values of each head: [B, H, S, V]."""
        heads = rearrange(self.kv_up(latent_BSR), "b s (h c) -> b h s c", h=self.num_heads)
        k_BHSC, v_BHSV = heads.split([self.head_dim, self.value_dim], dim=-1)
        q = torch.cat([q_BHSC, q_BHSP], dim=-1)
        k = torch.cat([k_BHSC, k_BSP[:, None].expand_as(q_BHSP)], dim=-1)
        return F.scaled_dot_product_attention(q, k, v_BHSV, mask_B1SS, is_causal=mask_B1SS is None, scale=self.scale)

    def absorbed(self, q_BHSC: Tensor, q_BHSP: Tensor, kept_B1LM: Tensor) -> Tensor:
        """Attention of the last S of L positions, by what a cache keeps of them, without gradients: [B, H, S, V]."""
        up_HWR = rearrange(self.kv_up.weight, "(h w) r -> h w r", h=self.num_heads)
        up_HCR, up_HVR = up_HWR.split([self.head_dim, self.value_dim], dim=1)
        q = torch.cat([torch.einsum("bhsc,hcr->bhsr", q_BHSC, up_HCR), q_BHSP], dim=-1)
        new, length = q.shape[2], kept_B1LM.shape[2]
        if new == 1:
            # All heads see the same past: as the positions of a single head they read it once, and no copies are made.
            q, seen_SL = q.transpose(1, 2), None
        else:
            seen_SL = q.new_ones(new, length, dtype=torch.bool).tril(length - new)
        k = kept_B1LM.expand(-1, q.shape[1], -1, -1)
        y = F.scaled_dot_product_attention(q, k, k[..., : self.kv_rank], seen_SL, scale=self.scale)
        y_BHSR = y.transpose(1, 2) if new == 1 else y
        return torch.einsum("bhsr,hvr->bhsv", y_BHSR, up_HVR)
