"""The model has the same losses and gradients with Triton kernels as with plain torch."""

import pytest
import torch

from moe_dualpipe.expert_parallel import Loopback
from moe_dualpipe.expert_parallel.autograd import combine, dispatch
from moe_dualpipe.kernels.weight_grads import WeightGrads, bind
from moe_dualpipe.models import ModelConfig, StageOptions, build_model, next_token_loss
from tests.support.kernels import DEVICE, FLOOR, LinearExperts, error

TINY = {
    "hidden_size": 16, "num_layers": 2, "num_dense_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
    "dense_size": 24, "expert_size": 8, "num_experts": 4, "experts_per_token": 2, "vocab_size": 32, "init_std": 0.3,
}  # fmt: skip


def tokens(seed, batch=1, length=6):
    return torch.randint(0, 32, (batch, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def model(kernels, ep=None, recompute="none", **changes):
    config = ModelConfig(**{**TINY, **changes})
    return build_model(config, ep, options=StageOptions(seed=1, recompute=recompute, kernels=kernels)).to(DEVICE)


def gradients(module):
    return {name: p.grad for name, p in module.named_parameters()}


def assert_same(ours, reference, factor=3):
    assert ours.keys() == reference.keys()
    for name, grad in reference.items():
        assert error(ours[name], grad) <= factor * FLOOR[torch.float32], name


@pytest.mark.parametrize("changes", [{}, {"router_score": "sigmoid", "expert_groups": 2, "top_groups": 1}], ids=str)
@pytest.mark.parametrize("recompute", ["none", "norms", "full"])
@pytest.mark.quick("none-{}")
def test_forward_and_backward(recompute, changes):
    results = []
    for kernels in ("reference", "triton"):
        module = model(kernels, recompute=recompute, **changes)
        loss = next_token_loss(module(tokens(1)), tokens(2))
        loss.backward()
        results.append((loss.item(), gradients(module)))
    (loss, expected), (our_loss, ours) = results
    assert our_loss == pytest.approx(loss, rel=1e-6)
    assert_same(ours, expected)


def test_an_overlapped_pair_is_bit_identical_to_sequential_execution():
    """The kernels add in a fixed order, so overlapping does not change results."""
    results = []
    for overlapped in (False, True):
        module = model("triton", Loopback(4, 2, kernels="triton"))
        weight_grads = WeightGrads()
        bind(module, weight_grads)
        loss1 = next_token_loss(module(tokens(1)), tokens(2))
        if overlapped:
            pair = type(module).overlapped_forward_backward
            _, loss0 = pair(module, [tokens(3)], next_token_loss, [tokens(4)], module, loss1, None, None)
        else:
            loss0 = next_token_loss(module(tokens(3)), tokens(4))
            loss1.backward()
        with weight_grads.defer_to("later"):
            loss0.backward()
        weight_grads.run_deferred("later")
        results.append((loss0.detach(), loss1.detach(), gradients(module)))
    (a0, a1, expected), (b0, b1, ours) = results
    assert torch.equal(a0, b0)
    assert torch.equal(a1, b1)
    for name, grad in expected.items():
        assert torch.equal(ours[name], grad), name


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_an_expanded_gradient_is_dispatched(kernels):
    ep = Loopback(4, 2, kernels=kernels)
    x, ids = torch.randn(5, 8, device=DEVICE, requires_grad=True), torch.tensor([[0, 1], [0, 3], [2, 3]] * 2)[:5]
    route = ep.prepare(ids.to(DEVICE))
    x_ND, _ = dispatch(x, torch.ones(5, 2, device=DEVICE), route, ep)
    combine(x_ND, route, ep).sum().backward()  # the gradient of a sum is expanded and has stride 0
    assert x.grad.tolist() == [[ranks] * 8 for ranks in (1, 2, 1, 1, 2)]


def test_custom_experts_get_the_same_rows():
    results = []
    for kernels in ("reference", "triton"):
        module = model(kernels, experts="tests.support.kernels:LinearExperts")
        assert [m.kernels for m in module.modules() if isinstance(m, LinearExperts)] == [kernels]
        loss = next_token_loss(module(tokens(1)), tokens(2))
        loss.backward()
        results.append((loss.item(), gradients(module)))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-6)
    assert_same(results[1][1], results[0][1])
