"""Rotary position embedding (arXiv 2104.09864), and how it is extended to longer contexts.

Channels i and i + C/2 of a query or key are rotated by the angle position * theta^(-2i / C). In short contexts, slow
channels do not complete a rotation, so a longer context has angles that training never showed. Slow frequencies are
divided by a factor, so that their angles stay within those of the short context (`ModelConfig.rope_scaling`):

    yarn      keeps fast frequencies, and interpolates over the channels in between. It also increases the attention
              scores with the logarithm of the factor (arXiv 2309.00071).
    llama3    keeps fast frequencies, and interpolates over the rotations in between (arXiv 2407.21783).
    linear    divides all frequencies (arXiv 2306.15595).
    dynamic   increases theta with the length of the sequence, once it is longer than the short context. So the first
              positions of a long sequence are rotated differently from those of a short one. With a cache, keys stay
              as they were rotated, as in transformers.

S positions, C rotated channels.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from moe_dualpipe.kernels.fuse import is_traced
from moe_dualpipe.kernels.linear import at_least_fp32

from .config import ModelConfig
from .context_parallel import Context


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotations of `width` channels, an even number. `config` has theta and the options of YaRN."""

    width: int
    config: ModelConfig

    def table(self, like_S: Tensor, start: int = 0, context: Context | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles of S positions from `start`, times the factor of YaRN, each [S, C].

        Each of the C/2 angles of a position appears twice. `like_S` gives the length, device and dtype. context: return
        those of the S positions of this rank, from 0.
        """
        table = _table.__wrapped__ if is_traced(like_S) else _table  # a cache is for tensors with values
        return table(self, len(like_S), start, like_S.dtype, like_S.device, context)

    def frequencies(self, channels: Tensor, length: int) -> Tensor:
        """The angles between two positions of a sequence of `length`, for even channels."""
        config, theta = self.config, self.config.rope_theta
        factor, positions = config.yarn_factor, config.yarn_positions
        if config.rope_scaling == "dynamic" and length > positions:
            theta *= (factor * length / positions - (factor - 1)) ** (self.width / (self.width - 2))
        frequencies = theta ** -(channels / self.width)
        if factor == 1 or config.rope_scaling == "dynamic":
            return frequencies
        if config.rope_scaling == "linear":
            return frequencies / factor
        if config.rope_scaling == "llama3":
            at, first, last = -positions * frequencies / (2 * math.pi), -config.yarn_beta_fast, -config.yarn_beta_slow
        else:
            at, first, last = channels / 2, *self.interpolated
        slowed = ((at - first) / (last - first or 0.001)).clamp(0, 1)
        return frequencies / factor * slowed + frequencies * (1 - slowed)

    @property
    def interpolated(self) -> tuple[float, float]:
        """YaRN: the indices of the last frequency that is kept, and of the first that is divided by the full factor.

        The fastest frequency has index 0.
        """
        first, last = (self._channel(beta) for beta in (self.config.yarn_beta_fast, self.config.yarn_beta_slow))
        if self.config.yarn_truncate:
            first, last = math.floor(first), math.ceil(last)
        return max(0, first), min(self.width - 1, last)

    def _channel(self, rotations: float) -> float:
        """The index, not rounded, of the frequency that makes this number of rotations in the short context."""
        angle = self.config.yarn_positions / (rotations * 2 * math.pi)
        return self.width * math.log(angle) / (2 * math.log(self.config.rope_theta))

    @property
    def scale(self) -> float:
        """The factor on rotated queries and keys."""
        config = self.config
        if config.rope_scaling == "yarn" and config.yarn_attention_factor:
            return config.yarn_attention_factor
        if config.yarn_mscale and config.yarn_mscale_all_dim:
            return growth(config, config.yarn_mscale) / growth(config, config.yarn_mscale_all_dim)
        return growth(config, 1.0)


@lru_cache(maxsize=8)  # all layers of a model use the same table, step after step
@torch.inference_mode(False)  # a table that is first used in inference is used in training later
def _table(
    rotary: Rotary, length: int, start: int, dtype: torch.dtype, device: torch.device, context: Context | None
) -> tuple[Tensor, Tensor]:
    if context is not None:
        whole = _table.__wrapped__(rotary, length * context.size, start, dtype, device, None)
        return context.cut(whole[0], 0), context.cut(whole[1], 0)
    positions_S = torch.arange(start, start + length, device=device, dtype=dtype)
    channels = torch.arange(0, rotary.width, 2, device=device, dtype=dtype)
    angles_SC = torch.outer(positions_S, rotary.frequencies(channels, start + length)).repeat(1, 2)
    return angles_SC.cos() * rotary.scale, angles_SC.sin() * rotary.scale


def growth(config: ModelConfig, mscale: float) -> float:
    """YaRN's scale for a longer context: 1 + 0.1 mscale ln(factor). Example: factor 40, mscale 1 -> 1.369."""
    return 1 + 0.1 * mscale * math.log(config.yarn_factor) if config.rope_scaling == "yarn" else 1.0


def rotate(x: Tensor, cos_SC: Tensor, sin_SC: Tensor) -> Tensor:
    """Rotate the first C channels of x, [..., H, S, W] with W >= C: channel i together with i + C/2."""
    width = cos_SC.shape[-1]
    rotated_part, rest = (x, None) if width == x.shape[-1] else x.split([width, x.shape[-1] - width], dim=-1)
    first, second = at_least_fp32(rotated_part).chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    result = (at_least_fp32(rotated_part) * cos_SC + turned * sin_SC).to(x.dtype)
    if rest is None:
        return result
    # Positions before heads in memory, as in x: so attention returns its result in this order, without a copy.
    return torch.cat([result.transpose(-3, -2), rest.transpose(-3, -2)], dim=-1).transpose(-3, -2)
