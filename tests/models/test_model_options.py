"""Options of published models: YaRN, partial rotary embeddings, biases, gated shared experts, tied embeddings."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_dualpipe.kernels.weight_grads import WeightGrads, bind
from moe_dualpipe.models import ModelConfig, StageOptions, build_model
from moe_dualpipe.models.attention import Attention
from moe_dualpipe.models.rotary import Rotary, rotate

CONFIG = ModelConfig(
    vocab_size=61, hidden_size=16, num_layers=4, num_dense_layers=1, dense_layers=(2,), num_heads=4, num_kv_heads=2,
    head_dim=8, dense_size=24, expert_size=12, num_experts=4, experts_per_token=2, init_std=0.2, qkv_bias=True,
    out_bias=True, rotary_fraction=0.5, shared_gate=True, yarn_factor=4.0, yarn_positions=16,
)  # fmt: skip
YARN = replace(CONFIG, rope_theta=500.0, yarn_factor=6.0, yarn_positions=100, yarn_beta_fast=5.0, yarn_beta_slow=0.5)


def batch(seed):
    return torch.randint(61, (2, 10), generator=torch.Generator().manual_seed(seed))


def trained(config=CONFIG, **choices) -> Any:
    """A model whose biases and norms differ from their initial values."""
    model = build_model(config, options=StageOptions(seed=3, **choices))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.linspace(-0.5, 0.5, len(parameter)))
    return model


def step(model, tokens_BL):
    loss = model.loss(model(tokens_BL[:, :-1]), tokens_BL[:, 1:])
    loss.backward()
    return loss.detach()


# ---- Longer contexts ----


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
    config = replace(YARN, rope_scaling=frequencies.__name__, yarn_mscale=mscale, yarn_mscale_all_dim=all_dim)
    cos_SC, sin_SC = Rotary(width, config).table(torch.empty(9, dtype=torch.float64), start=start)
    found = frequencies(width, config, start + 9)
    angles = torch.tensor([[p * f for f in found * 2] for p in range(start, start + 9)], dtype=torch.float64)
    torch.testing.assert_close(cos_SC, growth * angles.cos(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sin_SC, growth * angles.sin(), rtol=1e-12, atol=1e-12)


def test_yarn_scales_all_scores_of_latent_attention():
    latent = {"attention": "mla", "qkv_bias": False, "rotary_fraction": 1.0}
    plain, grown = (
        trained(replace(YARN, **latent, yarn_mscale_all_dim=all_dim)).layers["0"].attention.scale
        for all_dim in (0.0, 0.9)
    )
    assert grown / plain == pytest.approx((1 + 0.09 * math.log(6)) ** 2)


# ---- Partial rotary embeddings, biases, gates ----


def test_rotations_are_computed_once_and_those_of_inference_serve_training():
    with torch.inference_mode():
        tables = Rotary(6, ModelConfig()).table(torch.empty(5))
    again = Rotary(6, ModelConfig()).table(torch.empty(5))
    assert all(one is other for one, other in zip(tables, again, strict=True))
    x_SC = torch.ones(5, 6, requires_grad=True)
    rotate(x_SC, *again).sum().backward()
    assert not torch.equal(again[0], Rotary(6, ModelConfig()).table(torch.empty(5), start=1)[0])


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.25])
def test_scores_of_a_partial_rotation_equal_a_loop(fraction):
    config = replace(CONFIG, rotary_fraction=fraction, yarn_factor=1.0)
    q_SC, k_SC = torch.randn(2, 5, 8, dtype=torch.float64)
    tables = Attention(config).rotary.table(q_SC[:, 0])
    scores = (rotate(q_SC[None], *tables) @ rotate(k_SC[None], *tables).mT)[0]
    half = int(8 * fraction) // 2
    for i in range(5):
        for j in range(5):
            expected = sum(q_SC[i, c] * k_SC[j, c] for c in range(2 * half, 8))
            for c in range(half):
                angle = torch.tensor((i - j) * 1e4 ** (-c / half), dtype=torch.float64)
                turn = torch.polar(torch.ones_like(angle), angle)
                q, k = (torch.complex(x[c], x[c + half]) for x in (q_SC[i], k_SC[j]))
                expected += (q * turn * k.conj()).real
            torch.testing.assert_close(scores[i, j], torch.as_tensor(expected), rtol=1e-12, atol=1e-12)


def test_the_gate_multiplies_the_output_of_the_shared_experts():
    layer = trained().layers["1"].mlp
    x_TD = torch.randn(7, 16)
    out_TD = layer(x_TD)
    shared_TD, gate = layer.shared(x_TD), layer.shared_gate
    layer.shared = layer.shared_gate = None
    factors_T = 1 / (1 + (-(x_TD * gate.weight[0]).sum(1)).exp())
    assert factors_T.std() > 0.05
    torch.testing.assert_close(out_TD, layer(x_TD) + factors_T[:, None] * shared_TD)


# ---- Tied embeddings ----


@pytest.mark.parametrize("fused_loss", [False, True])
@pytest.mark.parametrize("mtp_layers", [0, 2])
@pytest.mark.parametrize("deferred", [False, True])
def test_a_tied_weight_gets_the_gradients_of_embedding_and_head(fused_loss, mtp_layers, deferred):
    """Compared with a separate head of the same weight."""
    config = replace(CONFIG, mtp_layers=mtp_layers)
    tied = trained(replace(config, tied_embeddings=True), fused_loss=fused_loss).double()
    apart = trained(config, fused_loss=fused_loss).double()
    assert {n for n, _ in apart.named_parameters()} - {n for n, _ in tied.named_parameters()} == {"head.weight"}
    apart.load_state_dict(tied.state_dict() | {"head.weight": tied.embedding.weight.detach()})
    weight_grads = WeightGrads()
    bind(tied, weight_grads)
    if deferred:
        with weight_grads.defer_to("later"):
            loss = step(tied, batch(1))
        assert any(parameter is tied.embedding.weight for parameter, *_ in weight_grads._deferred["later"])
        weight_grads.run_deferred("later")
    else:
        loss = step(tied, batch(1))
    assert torch.equal(loss, step(apart, batch(1)))
    both = apart.embedding.weight.grad + apart.head.weight.grad
    torch.testing.assert_close(tied.embedding.weight.grad, both, rtol=1e-12, atol=1e-14)
    for name, parameter in tied.named_parameters():
        if name != "embedding.weight":
            assert torch.equal(parameter.grad, apart.get_parameter(name).grad), name


# ---- Refusals ----


def test_yarn_needs_an_interval_of_rotations():
    with pytest.raises(ValueError, match=r"yarn_beta_fast must be at least yarn_beta_slow: got 0\.5 and 1\.0"):
        replace(CONFIG, yarn_beta_fast=0.5)
