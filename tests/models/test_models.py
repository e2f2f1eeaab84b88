"""Each part of the model against a plain loop-and-einsum oracle, and the laws of splitting and seeding."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from moe_dualpipe.expert_parallel import Local
from moe_dualpipe.kernels.permute import permute
from moe_dualpipe.models import (
    PRESETS,
    ModelConfig,
    MoE,
    StageOptions,
    TransformerStage,
    build_model,
    expert_loads,
    preset,
    split,
)
from moe_dualpipe.models.attention import Attention
from moe_dualpipe.models.experts import expert_class
from moe_dualpipe.models.layers import seeded
from moe_dualpipe.models.partition import layer_flops
from moe_dualpipe.models.router import Router
from moe_dualpipe.models.transformer import next_token_loss
from tests.support.caches import check_that_a_cached_forward_is_the_forward
from tests.support.oracles import moe_oracle

CONFIG = ModelConfig(
    vocab_size=31, hidden_size=16, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=6, dense_size=20,
    expert_size=8, num_experts=5, experts_per_token=2, init_std=0.3,
)  # fmt: skip


def with_choices(**choices):
    return dataclasses.replace(CONFIG, **choices)


# ---- Attention ----


def attention_oracle(layer: Attention, x_BSD: torch.Tensor) -> torch.Tensor:
    """Head by head, position by position; a rotation is a complex multiplication."""
    heads, kv_heads, width = layer.num_heads, layer.num_kv_heads, layer.head_dim
    batch, length, _ = x_BSD.shape
    projected = normalised_heads(layer, x_BSD @ layer.qkv.weight.T)
    frequencies = torch.tensor([layer.rope_theta ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64)

    def head(index):
        return projected[:, :, index * width : (index + 1) * width]

    def turn(v):
        pairs = torch.complex(v[..., : width // 2], v[..., width // 2 :])
        turned = pairs * torch.polar(torch.ones(()).double(), torch.arange(length)[:, None] * frequencies)
        return torch.cat([turned.real, turned.imag], -1)

    outputs = []
    for h in range(heads):
        group = h // (heads // kv_heads)
        q, k, v = turn(head(h)), turn(head(heads + group)), head(heads + kv_heads + group)
        out = torch.zeros_like(v)
        for b in range(batch):
            for s in range(length):
                scores = torch.stack([q[b, s] @ k[b, t] / math.sqrt(width) for t in range(s + 1)])
                out[b, s] = sum(p * v[b, t] for t, p in enumerate(scores.softmax(0)))
        outputs.append(out)
    return torch.cat(outputs, -1) @ layer.out.weight.T


def normalised_heads(layer: Attention, projected_BSW: torch.Tensor) -> torch.Tensor:
    """Queries and keys after QK-norm: each slice of channels that is normalised as one has a root mean square of 1."""
    norms = {name: p for name, p in layer.named_parameters() if "norm" in name}
    pieces, start = [], 0
    for name, heads in (("q_norm.weight", layer.num_heads), ("k_norm.weight", layer.num_kv_heads)) if norms else ():
        for _ in range(heads * layer.head_dim // len(norms[name])):
            x = projected_BSW[..., start : start + len(norms[name])]
            pieces.append(x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * norms[name])
            start += len(norms[name])
    return torch.cat([*pieces, projected_BSW[..., start:]], -1)


def uneven_norms(module):
    """`module` in fp64, in which no norm is as good as none, or as another."""
    with torch.no_grad():
        for norm in module.modules():
            if isinstance(norm, nn.RMSNorm):
                norm.weight.uniform_(0.5, 2)
    return module.double()


@pytest.mark.parametrize("qk_norm", ["none", "head", "full"])
@pytest.mark.parametrize("heads,kv_heads", [(4, 4), (4, 2), (4, 1)])
def test_attention_equals_a_loop(heads, kv_heads, qk_norm):
    config = with_choices(num_heads=heads, num_kv_heads=kv_heads, qk_norm=qk_norm, norm_eps=0.1)
    layer = uneven_norms(Attention(config, out_std=0.3))
    widths = {"none": [], "head": [6, 6], "full": [6 * heads, 6 * kv_heads]}[qk_norm]
    assert [p.numel() for name, p in layer.named_parameters() if "norm" in name] == widths
    x = torch.randn(2, 7, CONFIG.hidden_size, dtype=torch.float64)
    torch.testing.assert_close(layer(x), attention_oracle(layer, x))


@pytest.mark.parametrize("qk_norm", ["head", "full"])
def test_a_cache_holds_keys_that_are_normalised(qk_norm):
    model = uneven_norms(build_model(with_choices(qk_norm=qk_norm)))
    check_that_a_cached_forward_is_the_forward(model, 2)


def test_attention_sees_no_later_position():
    layer = Attention(CONFIG, out_std=0.3)
    x = torch.randn(1, 9, CONFIG.hidden_size)
    changed = x.clone()
    changed[:, 5:] += 1
    torch.testing.assert_close(layer(x)[:, :5], layer(changed)[:, :5])
    assert not torch.allclose(layer(x)[:, 5:], layer(changed)[:, 5:])


# ---- Experts and the Mixture-of-Experts layer ----


@pytest.mark.parametrize("tokens", [1, 7, 40])
@pytest.mark.parametrize("choices", [{}, {"num_shared_experts": 0}, {"experts_per_token": 1}, {"experts_per_token": 5}])
def test_moe_equals_a_loop_with_all_gradients(tokens, choices):
    config = with_choices(**choices)
    layer = MoE(config, Local(config.num_experts), "layers.0", StageOptions(seed=1)).double()
    x = torch.randn(tokens, config.hidden_size, dtype=torch.float64, requires_grad=True)
    outcomes = []
    for function in (layer, lambda v: moe_oracle(layer, v)):
        torch.manual_seed(0)
        y = function(x)
        y.backward(torch.randn_like(y))
        outcomes.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
        layer.zero_grad()
        x.grad = None
    for ours, expected in zip(*outcomes, strict=True):
        expected = torch.zeros_like(ours) if expected is None else expected
        torch.testing.assert_close(ours, expected)


def test_gradients_of_a_whole_model_against_finite_differences():
    """Along a random direction of each parameter, in fp64."""
    model = build_model(with_choices(num_layers=2, router_score="sigmoid", qk_norm="head")).double()
    tokens = torch.randint(CONFIG.vocab_size, (1, 6))
    labels = torch.randint(CONFIG.vocab_size, (1, 6))

    def loss():
        return next_token_loss(model(tokens), labels)

    loss().backward()
    for name, parameter in model.named_parameters():
        direction = torch.randn_like(parameter)
        slope = (parameter.grad * direction).sum().item()
        values, step = [], 1e-6
        for sign in (1, -1):
            with torch.no_grad():
                parameter += sign * step * direction
                values.append(loss().item())
                parameter -= sign * step * direction
        measured = (values[0] - values[1]) / (2 * step)
        assert measured == pytest.approx(slope, rel=1e-6, abs=1e-8), name


class Doubling(nn.Module):
    """Somebody's own experts: no parameters, records what it is given."""

    def __init__(self, config, num_local_experts):
        super().__init__()
        assert config.num_experts == num_local_experts
        self.seen: list[tuple[int, list[int]]] = []

    def forward(self, x_MD, expert_offsets):
        self.seen.append((len(x_MD), expert_offsets.tolist()))
        return 2 * x_MD


class Shrinking(Doubling):
    def forward(self, x_MD, expert_offsets):
        return super().forward(x_MD, expert_offsets)[:, :1]


class Unsummed(Doubling):
    takes_order = True

    def forward(self, x_ND, order, _weights_NK):
        return permute(x_ND, order)


def test_your_own_experts_take_the_place_of_ours():
    config = with_choices(experts="tests.models.test_models:Doubling", num_shared_experts=0)
    layer = MoE(config, Local(config.num_experts), "layers.0")
    x = torch.randn(2, 3, config.hidden_size)
    torch.testing.assert_close(layer(x), 2 * x)  # weights sum to one
    assert isinstance(layer.experts, nn.Module)
    rows, offsets = layer.experts.seen[0]  # type: ignore[index]
    assert rows == offsets[-1] == 6 * config.experts_per_token
    with pytest.raises(
        ValueError, match=r"Shrinking must map rows \[12, 16\] to rows of the same shape: got \[12, 1\]"
    ):
        MoE(with_choices(experts="tests.models.test_models:Shrinking"), Local(5), "layers.0")(x)
    with pytest.raises(ValueError, match=r"Unsummed must map rows \[6, 16\] to rows of the same shape: got \[12, 16\]"):
        MoE(with_choices(experts="tests.models.test_models:Unsummed"), Local(5), "layers.0")(x)


@pytest.mark.parametrize("name,problem", [
    ("nowhere_at_all:Experts", "cannot import the expert layer 'nowhere_at_all:Experts'"),
    ("tests.models.test_models:Missing", "tests.models.test_models has no Missing"),
])  # fmt: skip
def test_experts_that_cannot_be_found(name, problem):
    with pytest.raises(ValueError, match=problem):
        expert_class(name)


# ---- Stages ----


def test_split_balances_and_says_so():
    for num_stages in range(1, 5):
        specs = split(CONFIG, num_stages)
        assert [layer for spec in specs for layer in spec.layers] == list(range(4))
        assert [spec.embedding for spec in specs] == [True] + [False] * (num_stages - 1)
        assert [spec.head for spec in specs] == [False] * (num_stages - 1) + [True]
        assert sum(spec.share for spec in specs) == pytest.approx(1)
    assert str(split(CONFIG, 1)[0]) == "embedding + layers 0-3 + head (100% of the work)"
    with pytest.raises(ValueError, match="4 layers cannot be divided over 5 pipeline stages: use at least 5 layers"):
        split(CONFIG, 5)


@pytest.mark.parametrize("vocab,stages", [(31, 2), (31, 3), (4000, 2), (4000, 3)])
def test_split_is_the_best_of_all_divisions(vocab, stages):
    config = with_choices(vocab_size=vocab, num_layers=7, num_dense_layers=3)
    costs = [layer_flops(config, layer) for layer in range(7)]
    costs[-1] += config.hidden_size * vocab
    slowest = max(sum(costs[layer] for layer in spec.layers) for spec in split(config, stages))

    def divisions(start, left):
        if left == 1:
            return [[range(start, 7)]]
        return [[range(start, cut), *rest] for cut in range(start + 1, 7) for rest in divisions(cut, left - 1)]

    assert slowest == min(max(sum(costs[i] for i in part) for part in parts) for parts in divisions(0, stages))


def test_stages_chain_to_the_whole_model_and_hold_its_weights():
    model = build_model(CONFIG, options=StageOptions(seed=4))
    x = torch.randint(CONFIG.vocab_size, (2, 5))
    for num_stages in (2, 4):
        stages = [TransformerStage(CONFIG, spec, options=StageOptions(seed=4)) for spec in split(CONFIG, num_stages)]
        y = x
        for stage in stages:
            y = stage(y)
        assert torch.equal(y, model(x))
        names = [name for stage in stages for name in stage.state_dict()]
        assert sorted(names) == sorted(model.state_dict())


def test_weights_depend_on_seed_and_name_only():
    torch.manual_seed(1)
    first = build_model(CONFIG, options=StageOptions(seed=4)).state_dict()
    before = torch.random.get_rng_state()
    second = build_model(CONFIG, options=StageOptions(seed=4)).state_dict()
    assert torch.equal(before, torch.random.get_rng_state())  # the caller's generator is left alone
    other = build_model(CONFIG, options=StageOptions(seed=5)).state_dict()
    for name, value in first.items():
        assert torch.equal(value, second[name])
        assert value.ndim == 1 or not torch.equal(value, other[name]), name
    with seeded(0, "a"):
        a = torch.rand(3)
    with seeded(0, "b"):
        assert not torch.equal(a, torch.rand(3))
    values = first["layers.1.mlp.experts.gate_up"]
    assert not torch.equal(values[0], values[1])


def test_a_model_without_numbers_draws_none():
    before = torch.random.get_rng_state()
    with torch.device("meta"):
        model = build_model(CONFIG)
    assert model.head.weight.is_meta
    assert torch.equal(before, torch.random.get_rng_state())


def test_expert_loads_are_one_row_a_layer():
    model = build_model(CONFIG)
    loss = next_token_loss(model(torch.zeros(2, 4, dtype=torch.int64)), torch.zeros(2, 4, dtype=torch.int64))
    assert loss.ndim == 0
    loads = expert_loads(model)
    assert loads.shape == (3, CONFIG.num_experts)
    assert (loads.sum(1) == 8 * CONFIG.experts_per_token).all()
    assert expert_loads(nn.Linear(1, 1)) is None


def test_loss_is_in_nats():
    logits = torch.zeros(2, 3, 256, dtype=torch.bfloat16)
    loss = next_token_loss(logits, torch.zeros(2, 3, dtype=torch.int64))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(256))


# ---- Configuration ----


@pytest.mark.parametrize("choices,problem", [
    ({"num_heads": 3}, "num_heads must be a multiple of num_kv_heads: got 3, 2"),
    ({"head_dim": 5}, "head_dim must be even: got 5"),
    ({"attention": "mha"}, "attention must be gqa or mla: got 'mha'"),
    ({"attention": "mla", "rope_dim": 5}, "rope_dim must be even, because channels form pairs: got 5; use 6"),
    ({"qk_norm": "both"}, "qk_norm must be none, head or full: got 'both'"),
    ({"attention": "mla", "qk_norm": "head"}, "qk_norm is only for gqa attention: got 'head' with mla; use none"),
    ({"q_rank": -1}, "q_rank cannot be negative: got -1; use 0 for queries without a latent"),
    ({"kv_rank": 0}, "kv_rank must be at least 1: got 0"),
    ({"experts_per_token": 9}, "experts_per_token must be at most num_experts: got 9 of 5"),
    ({"num_layers": 0}, "num_layers must be at least 1: got 0"),
    ({"num_shared_experts": -1}, "cannot be negative"),
    ({"router_score": "relu"}, "router_score must be softmax or sigmoid: got 'relu'"),
    ({"experts": "mine"}, 'experts must be "swiglu" or "module:Class": got \'mine\''),
])  # fmt: skip
def test_choices_that_contradict_each_other(choices, problem):
    with pytest.raises(ValueError, match=problem):
        with_choices(**choices)


def test_what_only_one_kind_of_attention_needs_is_no_mistake_in_the_other():
    with_choices(attention="mla", num_heads=3, head_dim=5)
    with_choices(rope_dim=5)


def test_presets():
    assert preset("tiny") is PRESETS["tiny"]
    with pytest.raises(ValueError, match="unknown preset 'tinny'; did you mean 'tiny'"):
        preset("tinny")


# ---- What the configuration says reaches the layers ----


def test_choices_reach_every_layer():
    config = with_choices(norm_eps=0.5, rope_theta=7.0, num_shared_experts=2, hidden_size=64, dense_size=128)
    model = build_model(config)
    assert {norm.eps for norm in model.modules() if isinstance(norm, nn.RMSNorm)} == {0.5}
    assert {layer.rope_theta for layer in model.modules() if isinstance(layer, Attention)} == {7.0}
    assert model.get_parameter("layers.1.mlp.shared.down.weight").shape == (64, 2 * config.expert_size)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:  # projections into the residual stream start smaller
            smaller = (2 * config.num_layers) ** 0.5 if "out." in name or "down" in name else 1
            assert parameter.std().item() == pytest.approx(config.init_std / smaller, rel=0.2), name


@pytest.mark.parametrize("choices", [{}, {"attention": "mla"}, {"attention": "mla", "q_rank": 7}])
def test_layer_flops_count_the_weights_a_token_meets(choices):
    config = with_choices(**choices)
    for name, block in build_model(config).layers.items():
        active = sum(
            p.numel() * (CONFIG.experts_per_token / CONFIG.num_experts if ".experts." in key else 1)
            for key, p in block.named_parameters()
            if p.ndim > 1
        )
        assert layer_flops(config, int(name)) == 2 * active


def test_scores_and_angles_are_fp32_in_a_bf16_model():
    weights, _ = Router(CONFIG).bfloat16()(torch.randn(3, CONFIG.hidden_size).bfloat16())
    assert weights.dtype == torch.float32
    # Angles in bf16 would be off by whole turns at position 999; the reference is the same layer in fp32.
    layer = Attention(CONFIG, out_std=0.3).bfloat16()
    x = torch.randn(1, 1000, CONFIG.hidden_size).bfloat16()
    exact = Attention(CONFIG, out_std=0.3)
    exact.load_state_dict(layer.state_dict())
    error = (layer(x).float() - exact(x.float())).norm() / exact(x.float()).norm()
    assert error < 0.02


def test_the_head_sees_a_normalised_stream():
    model = build_model(CONFIG).double()
    tokens = torch.tensor([[3, 1, 2]])
    with torch.no_grad():
        model.norm.weight.uniform_(1, 2)
        h = model.embedding(tokens)
        for block in model.layers.values():
            h = block(h)
        h = h / (h.square().mean(-1, keepdim=True) + CONFIG.norm_eps).sqrt() * model.norm.weight
        torch.testing.assert_close(model(tokens), h @ model.head.weight.T)
