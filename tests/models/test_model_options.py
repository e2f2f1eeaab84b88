"""Longer contexts: rotations are those of the published formulas."""

import math
from dataclasses import replace

import pytest
import torch

from moe_dualpipe.models import ModelConfig
from moe_dualpipe.models.latent_attention import LatentAttention
from moe_dualpipe.models.rotary import Rotary

CONFIG = ModelConfig(
    attention="mla", rope_theta=500.0, yarn_factor=6.0, yarn_positions=100, yarn_beta_fast=5.0, yarn_beta_slow=0.5
)


def yarn(width, config, _length):
    """The frequencies in a loop, as in equations 20 to 25 of the paper (arXiv 2309.00071)."""

    def index(rotations):
        return width * math.log(config.yarn_positions / (2 * math.pi * rotations)) / (2 * math.log(config.rope_theta))

    low = max(math.floor(index(config.yarn_beta_fast)), 0)
    high = min(math.ceil(index(config.yarn_beta_slow)), width - 1)
    slowed = [min(max((i - low) / (high - low), 0), 1) for i in range(width // 2)]
    return [f * (1 - s + s / config.yarn_factor) for f, s in zip(plain(width, config.rope_theta), slowed, strict=True)]


def plain(width, theta):
    return [theta ** (-2 * i / width) for i in range(width // 2)]


def dynamic(width, config, length):
    """As in the function of this name in transformers: theta grows with the length of the sequence."""
    growth = config.yarn_factor * length / config.yarn_positions - (config.yarn_factor - 1)
    return plain(width, config.rope_theta * max(growth, 1) ** (width / (width - 2)))


def llama3(width, config, _length):
    """As in Llama 3's apply_scaling: by the number of rotations in the short context."""
    result = []
    for frequency in plain(width, config.rope_theta):
        turns = config.yarn_positions / (2 * math.pi / frequency)
        kept = min(max((turns - config.yarn_beta_slow) / (config.yarn_beta_fast - config.yarn_beta_slow), 0), 1)
        result.append((1 - kept) * frequency / config.yarn_factor + kept * frequency)
    return result


def linear(width, config, _length):
    return [frequency / config.yarn_factor for frequency in plain(width, config.rope_theta)]


@pytest.mark.parametrize("start", [3, 200])  # within the short context, and past it
@pytest.mark.parametrize("frequencies,width,mscale,all_dim,growth", [
    (yarn, 8, 0.0, 0.0, 1 + 0.1 * math.log(6)),
    (yarn, 30, 0.7, 0.9, (1 + 0.07 * math.log(6)) / (1 + 0.09 * math.log(6))),
    (yarn, 2, 1.0, 0.0, 1 + 0.1 * math.log(6)),
    *((kind, 30, 0.0, 0.0, 1.0) for kind in (dynamic, llama3, linear)),
])  # fmt: skip
def test_rotations_equal_the_published_formulas(frequencies, width, mscale, all_dim, growth, start):
    config = replace(CONFIG, rope_scaling=frequencies.__name__, yarn_mscale=mscale, yarn_mscale_all_dim=all_dim)
    cos_SC, sin_SC = Rotary(width, config).table(torch.empty(9, dtype=torch.float64), start=start)
    found = frequencies(width, config, start + 9)
    angles = torch.tensor([[p * f for f in found * 2] for p in range(start, start + 9)], dtype=torch.float64)
    torch.testing.assert_close(cos_SC, growth * angles.cos(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sin_SC, growth * angles.sin(), rtol=1e-12, atol=1e-12)


def test_yarn_scales_all_scores_of_latent_attention():
    plain, grown = (LatentAttention(replace(CONFIG, yarn_mscale_all_dim=all_dim)).scale for all_dim in (0.0, 0.9))
    assert grown / plain == pytest.approx((1 + 0.09 * math.log(6)) ** 2)
