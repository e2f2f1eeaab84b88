"""The Mixture-of-Experts layer: transfers in backward, and expert ids of -1.

Expert id -1 means "no expert": the result is that of any expert with weight 0, on every backend and rank count. That
the numbers of the layer are those of transformers is in tests/checkpoint/test_published_models.py.
"""

import pytest
import torch

from moe_dualpipe.expert_parallel import Link, Local, Loopback, Replay
from moe_dualpipe.expert_parallel.labels import COMBINE, DISPATCH
from moe_dualpipe.models import MoE, StageOptions
from moe_dualpipe.models.auxiliary_losses import sequence_loss
from moe_dualpipe.models.router import Router
from moe_dualpipe.overlap.labels import BACKWARD, FORWARD, label
from tests.support.delayed import Delayed
from tests.support.routers import D, E, with_choices

SECONDS = {label(kind, phase): 0.0 for kind in (DISPATCH, COMBINE) for phase in (FORWARD, BACKWARD)}
BACKENDS = {
    "local": lambda: Local(E),
    "delayed": lambda: Delayed(Local(E), Link()),
    "loopback of 2": lambda: Loopback(E, 2),
    "replay of 4": lambda: Replay(E, 4, SECONDS, sms=1),
}
EXPERTS = ("swiglu", "tests.support.kernels:LinearExperts")  # by an order, and by rows
# Tokens and choices per token; CONFIG has 3 choices.
KINDS = {"some": (11, 3), "more choices": (7, 5), "one choice": (9, 1), "none": (5, 2), "no tokens": (0, 2)}


class Decided(Router):
    """A router with given decisions."""

    skips_choices = True

    def choose(self, logits_TE, bias_E):
        return self.weights_TK, self.ids_TK


def decision(kind):
    """x [T, D], weights [T, K] and ids [T, K], of which about a third is -1 and one token has no expert."""
    tokens, k = KINDS[kind]
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, D, dtype=torch.float64, generator=generator)
    weights = torch.rand(tokens, k, dtype=torch.float64, generator=generator)
    ids = torch.randint(E, (tokens, k), generator=generator)
    ids[torch.rand(tokens, k, generator=generator) < (2 if kind == "none" else 0.3)] = -1
    ids[2:3] = -1
    return x, weights, ids


def moe(backend, experts="swiglu"):
    config = with_choices(experts=experts, num_shared_experts=0, sequence_loss=0.0, z_loss=0.0)
    layer = MoE(config, backend, 0, StageOptions(seed=1)).double()
    layer.router = Decided(config)
    return layer.double()


def outcome(layer, x, weights, ids):
    """The output, the gradients of x, of the weights and of the experts' parameters, and the load."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    layer.zero_grad()
    layer.router.weights_TK, layer.router.ids_TK = weights, ids
    y = layer(x)
    y.backward(torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view_as(y))
    parameters = [p.grad for p in layer.experts.parameters()]
    return [y.detach(), x.grad, weights.grad, *parameters], layer.take_load()


def assert_as_with_weight_zero(layer, x, weights, ids):
    """Compare choices of -1, whose weights are NaN, with choices of any expert, whose weights are 0."""
    skipped = ids < 0
    ours, load = outcome(layer, x, weights.masked_fill(skipped, torch.nan), ids)
    other_ids = torch.where(skipped, torch.arange(ids.numel()).view(ids.shape) % E, ids)
    theirs, _ = outcome(layer, x, weights.masked_fill(skipped, 0), other_ids)
    assert (ours[2][skipped] == 0).all()
    theirs[2] = theirs[2].masked_fill(skipped, 0)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    assert (ours[0][skipped.all(1)] == 0).all()
    assert load.tolist() == torch.bincount(ids[~skipped], minlength=E).tolist()


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_expert_equals_weight_zero(backend, experts):
    layer = moe(BACKENDS[backend](), experts)
    for kind in KINDS:
        assert_as_with_weight_zero(layer, *decision(kind))


class Uncounted(Local):
    """Does not know how many choices are valid, as on a GPU."""

    def prepare(self, expert_ids_TK):
        route = super().prepare(expert_ids_TK)
        route.num_choices, route.exact = expert_ids_TK.numel(), False
        return route


def test_experts_by_rows_get_no_rows_of_no_expert():
    """Their last offset is the number of rows, also where a GPU must be asked for it."""
    layer = moe(Uncounted(E), EXPERTS[1])
    for kind in KINDS:
        assert_as_with_weight_zero(layer, *decision(kind))


def test_the_sequence_loss_counts_chosen_experts_only():
    shares = torch.rand(2, 3, 4, dtype=torch.float64)
    ids = torch.tensor([[[0, 1], [1, -1], [-1, -1]], [[-1, -1]] * 3])
    frequency = torch.tensor([1, 2, 0, 0], dtype=torch.float64) * 4 / 3
    expected = (frequency * shares[0].mean(0)).sum() / 2  # the second sequence chooses no expert
    torch.testing.assert_close(sequence_loss(shares, ids), expected)


@pytest.mark.parametrize("trained", ["experts", "router"])
def test_ranks_that_share_experts_take_part_in_both_transfers_of_each_backward(trained, monkeypatch):
    """Also a rank whose tokens need no gradient: the others wait for it."""
    log, ep = [], Loopback(E, E)
    layer = MoE(with_choices(num_shared_experts=0), ep, 0, StageOptions(seed=1)).requires_grad_(False)
    getattr(layer, trained).requires_grad_(True)
    y = layer(torch.randn(4, D))
    with monkeypatch.context() as patch:
        patch.setattr(ep, "dispatch", lambda *args: log.append("dispatch") or Loopback.dispatch(ep, *args))
        patch.setattr(ep, "combine", lambda *args: log.append("combine") or Loopback.combine(ep, *args))
        y.square().sum().backward()
    assert log == ["dispatch", "combine"]
