"""Grouped-query attention against a loop, and the choice of its kernels on GPUs."""

import math
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from moe_dualpipe.models import build_model
from moe_dualpipe.models.attention import Attention
from moe_dualpipe.models.latent_attention import LatentAttention
from moe_dualpipe.models.sdpa import preferred_kernels
from tests.support.caches import check_that_a_cached_forward_is_the_forward
from tests.support.models import CONFIG, with_choices
from tests.support.oracles import uneven_norms


def attention_oracle(layer: Any, x_BSD: torch.Tensor) -> torch.Tensor:
    """A loop over heads and positions. A rotation is a complex multiplication."""
    heads, kv_heads, width, turned = layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.rotary.width
    batch, length, _ = x_BSD.shape
    projected = normalized_heads(layer, x_BSD @ layer.qkv.weight.T + layer.qkv.bias)
    frequencies = 1e4 ** (-2 / turned * torch.arange(turned // 2, dtype=torch.float64))

    def head(index):
        return projected[:, :, index * width : (index + 1) * width]

    def rotate(v):
        pairs = torch.complex(v[..., : turned // 2], v[..., turned // 2 : turned])
        rotated = pairs * torch.polar(torch.ones(()).double(), torch.arange(length)[:, None] * frequencies)
        return torch.cat([rotated.real, rotated.imag, v[..., turned:]], -1)

    outputs = []
    for h in range(heads):
        group = h // (heads // kv_heads)
        q, k, v = rotate(head(h)), rotate(head(heads + group)), head(heads + kv_heads + group)
        out = torch.zeros_like(v)
        for b in range(batch):
            for s in range(length):
                scores = torch.stack([q[b, s] @ k[b, t] / math.sqrt(width) for t in range(s + 1)])
                out[b, s] = sum(p * v[b, t] for t, p in enumerate(scores.softmax(0)))
        outputs.append(out)
    return torch.cat(outputs, -1) @ layer.out.weight.T + layer.out.bias


def normalized_heads(layer: Attention, projected_BSW: torch.Tensor) -> torch.Tensor:
    """Queries and keys after QK-norm: the root mean square of each normalized group of channels is 1."""
    norms = {name: p for name, p in layer.named_parameters() if "norm" in name}
    pieces, start = [], 0
    for name, heads in (("q_norm.weight", layer.num_heads), ("k_norm.weight", layer.num_kv_heads)) if norms else ():
        for _ in range(heads * layer.head_dim // len(norms[name])):
            x = projected_BSW[..., start : start + len(norms[name])]
            pieces.append(x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * norms[name])
            start += len(norms[name])
    return torch.cat([*pieces, projected_BSW[..., start:]], -1)


@pytest.mark.parametrize("fraction", [1.0, 0.7])  # 6 or 4 of 6 channels are rotated
@pytest.mark.parametrize("qk_norm", ["none", "head", "full"])
@pytest.mark.parametrize("heads,kv_heads", [(4, 4), (4, 2), (4, 1)])
def test_attention_equals_a_loop(heads, kv_heads, qk_norm, fraction):
    choices = {"num_heads": heads, "num_kv_heads": kv_heads, "qk_norm": qk_norm, "rotary_fraction": fraction}
    layer = uneven_norms(Attention(with_choices(norm_eps=0.1, qkv_bias=True, out_bias=True, **choices)))
    for bias in (layer.qkv.bias, layer.out.bias):
        bias.detach().uniform_(-1, 1)
    widths = {"none": [], "head": [6, 6], "full": [6 * heads, 6 * kv_heads]}[qk_norm]
    assert [p.numel() for name, p in layer.named_parameters() if "norm" in name] == widths
    x = torch.randn(2, 7, CONFIG.hidden_size, dtype=torch.float64)
    torch.testing.assert_close(layer(x), attention_oracle(layer, x))


@pytest.mark.parametrize("qk_norm", ["head", "full"])
def test_a_cache_holds_normalized_keys(qk_norm):
    model = uneven_norms(build_model(with_choices(qk_norm=qk_norm)))
    check_that_a_cached_forward_is_the_forward(model, 2)


@pytest.mark.parametrize("kind", [Attention, LatentAttention])
def test_angles_are_fp32_in_a_bf16_model(kind):
    """In bf16, angles at position 999 would be wrong by whole turns. The reference is the same layer in fp32."""
    layer = kind(CONFIG).bfloat16()
    x = torch.randn(1, 1000, CONFIG.hidden_size).bfloat16()
    exact = kind(CONFIG)
    exact.load_state_dict(layer.state_dict())
    error = (layer(x).float() - exact(x.float())).norm() / exact(x.float()).norm()
    assert error < 0.02


def test_cudnn_comes_first_where_it_is_fastest():
    order = preferred_kernels((9, 0))
    assert order is not None and order[0] == SDPBackend.CUDNN_ATTENTION
    assert len(set(order)) == 4  # what cuDNN does not support runs, too
    assert not any(map(preferred_kernels, [(8, 0), (8, 9), (12, 0)]))
