"""Rotary position embedding (arXiv 2104.09864), and YaRN (arXiv 2309.00071), which extends it to longer contexts.

Channels i and i + C/2 of a query or key are rotated by the angle position * theta^(-2i / C). In short contexts, slow
channels do not complete a rotation, so a longer context has angles that training never showed. YaRN divides slow
frequencies by a factor, so that their angles stay within those of the short context. It keeps fast frequencies, and
interpolates in between. It also increases the attention scores with the logarithm of the factor.

S positions, C rotated channels.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from moe_dualpipe.kernels.linear import at_least_fp32

from .config import ModelConfig


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotations of `width` channels, an even number. `config` has theta and the options of YaRN."""

    width: int
    config: ModelConfig

    def table(self, like_S: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles of S positions from `start`, times the factor of YaRN, each [S, C].

        Each of the C/2 angles of a position appears twice. `like_S` gives the length, device and dtype.
        """
        return _table(self, len(like_S), start, like_S.dtype, like_S.device)

    @property
    def first_slowed(self) -> int:
        """The index of the last frequency that is kept. The fastest frequency has index 0."""
        return max(0, math.floor(self._channel(self.config.yarn_beta_fast)))

    @property
    def ramp(self) -> float:
        """The distance from `first_slowed` to the first frequency that is divided by the full factor."""
        last = min(self.width - 1, math.ceil(self._channel(self.config.yarn_beta_slow)))
        return last - self.first_slowed or 0.001

    def _channel(self, rotations: float) -> float:
        """The index, not rounded, of the frequency that makes this number of rotations in the short context."""
        angle = self.config.yarn_positions / (rotations * 2 * math.pi)
        return self.width * math.log(angle) / (2 * math.log(self.config.rope_theta))

    @property
    def scale(self) -> float:
        """The factor on rotated queries and keys."""
        config = self.config
        if config.yarn_mscale and config.yarn_mscale_all_dim:
            return growth(config, config.yarn_mscale) / growth(config, config.yarn_mscale_all_dim)
        return growth(config, 1.0)


@lru_cache(maxsize=8)  # all layers of a model use the same table, step after step
@torch.inference_mode(False)  # a table that is first used in inference is used in training later
def _table(rotary: Rotary, length: int, start: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    config = rotary.config
    positions_S = torch.arange(start, start + length, device=device, dtype=dtype)
    channels = torch.arange(0, rotary.width, 2, device=device, dtype=dtype)
    frequencies = config.rope_theta ** -(channels / rotary.width)
    if config.yarn_factor == 1:
        angles_SC = torch.outer(positions_S, frequencies).repeat(1, 2)
        return angles_SC.cos(), angles_SC.sin()
    slowed = (channels / 2 - rotary.first_slowed).clamp(0, rotary.ramp) / rotary.ramp
    frequencies = frequencies / config.yarn_factor * slowed + frequencies * (1 - slowed)
    angles_SC, scale = torch.outer(positions_S, frequencies).repeat(1, 2), rotary.scale
    return angles_SC.cos() * scale, angles_SC.sin() * scale


def growth(config: ModelConfig, mscale: float) -> float:
    """YaRN's scale for a longer context: 1 + 0.1 mscale ln(factor). Example: factor 40, mscale 1 -> 1.369."""
    return 1 + 0.1 * mscale * math.log(config.yarn_factor)


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
