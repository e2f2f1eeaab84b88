"""The Mixture-of-Experts layer against a loop, and custom expert layers."""

from math import nan

import pytest
import torch
from torch import nn

from moe_dualpipe.expert_parallel import Combined, Completed, Local, Loopback, Received, Route
from moe_dualpipe.models import MoE, StageOptions
from tests.support.models import CONFIG, with_choices
from tests.support.oracles import moe_oracle


@pytest.mark.parametrize("tokens,choices", [
    (1, {}), (7, {}), (40, {}), (1, {"num_shared_experts": 0}), (7, {"experts_per_token": 1}),
    (40, {"experts_per_token": 5}), (7, {"shared_gate": True}),
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
