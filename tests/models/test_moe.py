"""The Mixture-of-Experts layer against a loop, and custom expert layers."""

import pytest
import torch
from torch import nn

from moe_dualpipe.expert_parallel import Local
from moe_dualpipe.kernels.permute import permute
from moe_dualpipe.models import MoE, StageOptions, build_model, expert_loads, next_token_loss
from moe_dualpipe.models.experts import expert_class
from tests.support.models import CONFIG, with_choices
from tests.support.oracles import moe_oracle


@pytest.mark.parametrize("tokens,choices", [
    (1, {}), (7, {}), (40, {}), (1, {"num_shared_experts": 0}), (7, {"experts_per_token": 1}),
    (40, {"experts_per_token": 5}),
], ids=str)  # fmt: skip
def test_moe_equals_a_loop_with_all_gradients(tokens, choices):
    config = with_choices(**choices)
    layer = MoE(config, Local(config.num_experts), 0, StageOptions(seed=1)).double()
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


class Doubling(nn.Module):
    """Experts without parameters that record their inputs."""

    def __init__(self, _config, _num_local_experts):
        super().__init__()
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


def test_your_own_experts_replace_swiglu():
    config = with_choices(experts="tests.models.test_moe:Doubling", num_shared_experts=0)
    layer = MoE(config, Local(config.num_experts), 0)
    x = torch.randn(2, 3, config.hidden_size)
    torch.testing.assert_close(layer(x), 2 * x)  # weights sum to one
    assert isinstance(layer.experts, nn.Module)
    rows, offsets = layer.experts.seen[0]  # type: ignore[index]
    assert rows == offsets[-1] == 6 * config.experts_per_token
    with pytest.raises(
        ValueError, match=r"Shrinking must map rows \[12, 16\] to rows of the same shape: got \[12, 1\]"
    ):
        MoE(with_choices(experts="tests.models.test_moe:Shrinking"), Local(5), 0)(x)
    with pytest.raises(ValueError, match=r"Unsummed must map rows \[6, 16\] to rows of the same shape: got \[12, 16\]"):
        MoE(with_choices(experts="tests.models.test_moe:Unsummed"), Local(5), 0)(x)


@pytest.mark.parametrize("name,problem", [
    ("nowhere_at_all:Experts", "cannot import the expert layer 'nowhere_at_all:Experts'"),
    ("tests.models.test_moe:Missing", "tests.models.test_moe has no Missing"),
])  # fmt: skip
def test_expert_layers_that_cannot_be_imported(name, problem):
    with pytest.raises(ValueError, match=problem):
        expert_class(name)


def test_expert_loads_are_one_row_per_layer():
    model = build_model(CONFIG)
    loss = next_token_loss(model(torch.zeros(2, 4, dtype=torch.int64)), torch.zeros(2, 4, dtype=torch.int64))
    assert loss.ndim == 0
    loads = expert_loads(model)
    assert loads.shape == (3, CONFIG.num_experts)
    assert (loads.sum(1) == 8 * CONFIG.experts_per_token).all()
    assert expert_loads(nn.Linear(1, 1)) is None
