"""The Mixture-of-Experts layer against a loop, and custom expert layers."""

import re
from math import nan

import pytest
import torch
from torch import nn

from moe_dualpipe.expert_parallel import Combined, Completed, Local, Loopback, Received, Route
from moe_dualpipe.kernels.permute import permute
from moe_dualpipe.models import MoE, StageOptions
from moe_dualpipe.models.own_calls import checked_output
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


@pytest.mark.parametrize("trained", ["experts", "router"])
def test_ranks_that_share_experts_take_part_in_both_transfers_of_each_backward(trained, monkeypatch):
    """Also a rank whose tokens need no gradient: the others wait for it."""
    log, ep = [], Loopback(5, 5)
    layer = MoE(with_choices(num_shared_experts=0), ep, 0, StageOptions(seed=1)).requires_grad_(False)
    getattr(layer, trained).requires_grad_(True)
    y = layer(torch.randn(4, CONFIG.hidden_size))
    with monkeypatch.context() as patch:
        patch.setattr(ep, "dispatch", lambda *args: log.append("dispatch") or Loopback.dispatch(ep, *args))
        patch.setattr(ep, "combine", lambda *args: log.append("combine") or Loopback.combine(ep, *args))
        y.square().sum().backward()
    assert log == ["dispatch", "combine"]


class Padded(Local):
    """Rows of NaN without experts follow the tokens, and their number is not known."""

    def prepare(self, expert_ids_TK):
        ids_NK = torch.cat([expert_ids_TK, torch.full((3, expert_ids_TK.shape[1]), -1)])
        return Route(self.num_experts, self.kernels, ids_NK, len(ids_NK), ids_NK.numel(), exact=False, padded=True)

    def dispatch(self, x_TD, route, weights_TK=None):
        padded = (t if t is None else nn.functional.pad(t, (0, 0, 0, 3), value=nan) for t in (x_TD, weights_TK))
        return Completed(Received(*padded))

    def combine(self, y_ND, route, weight_grads_NK=None):
        return Completed(Combined(*(t if t is None else t[:-3] for t in (y_ND, weight_grads_NK))))


def test_custom_experts_never_see_rows_past_the_received_ones():
    config = with_choices(experts="tests.models.test_moe:Doubling")
    outputs = []
    for ep in (Local(5), Padded(5)):
        torch.manual_seed(0)
        layer = MoE(config, ep, 0, StageOptions(seed=1))
        x = torch.randn(7, config.hidden_size, generator=torch.Generator().manual_seed(1)).requires_grad_()
        layer(x).sum().backward()
        outputs.append([layer.experts.seen, x.grad, layer.router.logits.weight.grad])
    assert outputs[0][0] == outputs[1][0]
    for ours, expected in zip(outputs[1][1:], outputs[0][1:], strict=True):
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


def test_under_autocast_an_output_may_have_its_dtype():
    for experts in ("swiglu", "tests.support.custom_experts:ListsOfStacks"):
        layer = MoE(with_choices(experts=experts), Local(5), 0)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(torch.randn(4, CONFIG.hidden_size)).shape == (4, CONFIG.hidden_size)
        on_meta = torch.empty(4, CONFIG.hidden_size, device="meta")  # a device without autocast
        assert checked_output("experts", layer, on_meta, on_meta) is on_meta


@pytest.mark.parametrize("name,expected,found", [("Shrinking", (12, 16), (12, 1)), ("Unsummed", (6, 16), (12, 16))])
def test_an_output_of_another_shape_is_refused(name, expected, found):
    message = re.escape(f"{name} must return {[*expected]} in float32 on cpu: got {[*found]}")
    layer = MoE(with_choices(experts=f"tests.models.test_moe:{name}"), Local(5), 0)
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(2, 3, CONFIG.hidden_size))
