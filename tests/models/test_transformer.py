"""Stages together equal the whole model. Initial weights depend on seed and name only."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from moe_dualpipe.models import StageOptions, TransformerStage, build_model, next_token_loss, split
from moe_dualpipe.models.attention import Attention
from moe_dualpipe.models.layers import seeded
from moe_dualpipe.models.recompute import add_up
from tests.support.models import CONFIG, with_choices


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
    assert torch.equal(before, torch.random.get_rng_state())  # the caller's generator does not change
    other = build_model(CONFIG, options=StageOptions(seed=5)).state_dict()
    for name, value in first.items():
        assert torch.equal(value, second[name])
        assert value.ndim == 1 or not torch.equal(value, other[name]), name
    with seeded(0, "a"):
        a = torch.rand(3)
    with seeded(0, "b"):
        assert not torch.equal(a, torch.rand(3))
    matrices = [m for value in first.values() if value.ndim > 1 for m in (value if value.ndim == 3 else [value])]
    assert len({tuple(matrix.flatten()[:3].tolist()) for matrix in matrices}) == len(matrices)


def test_a_model_on_the_meta_device_draws_no_random_numbers():
    before = torch.random.get_rng_state()
    with torch.device("meta"):
        model = build_model(CONFIG)
    assert model.head.weight.is_meta
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_configuration_reaches_every_layer():
    config = with_choices(norm_eps=0.5, rope_theta=7.0, num_shared_experts=2, hidden_size=64, dense_size=128)
    model = build_model(config)
    assert {norm.eps for norm in model.modules() if isinstance(norm, nn.RMSNorm)} == {0.5}
    assert {layer.rotary.config.rope_theta for layer in model.modules() if isinstance(layer, Attention)} == {7.0}
    assert model.get_parameter("layers.1.mlp.shared.down.weight").shape == (64, 2 * config.expert_size)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:  # projections into the residual stream start smaller
            smaller = (2 * config.num_layers) ** 0.5 if "out." in name or "down" in name else 1
            assert parameter.std().item() == pytest.approx(config.init_std / smaller, rel=0.2), name


def test_the_input_of_the_head_is_normalized():
    model = build_model(CONFIG).double()
    tokens = torch.tensor([[3, 1, 2]])
    with torch.no_grad():
        model.norm.weight.uniform_(1, 2)
        h = model.embedding(tokens)
        for block in model.layers.values():
            h = block(h)
        h = h / (h.square().mean(-1, keepdim=True) + CONFIG.norm_eps).sqrt() * model.norm.weight
        torch.testing.assert_close(model(tokens), h @ model.head.weight.T)


def test_loss_is_in_nats():
    logits = torch.zeros(2, 3, 256, dtype=torch.bfloat16)
    loss = next_token_loss(logits, torch.zeros(2, 3, dtype=torch.int64))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(256))


def test_expert_loads_are_counted_in_training_only():
    model = build_model(CONFIG)
    with torch.no_grad():
        model(torch.arange(6)[None])
    moe: Any = model.layers["2"].mlp
    assert moe.take_load().sum() == 0


def test_add_up_adds_the_residual_stream_last():
    assert add_up(torch.tensor([1.0]), torch.tensor([1e8]), torch.tensor([-1e8])).item() == 1
