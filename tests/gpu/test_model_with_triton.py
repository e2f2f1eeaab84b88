"""The model has the same losses and gradients with Triton kernels as with plain torch."""

from contextlib import nullcontext

import pytest
import torch

from moe_dualpipe.expert_parallel import Loopback, combine, dispatch
from moe_dualpipe.expert_parallel import local as local_backend
from moe_dualpipe.kernels.order import ExpertOrder
from moe_dualpipe.kernels.weight_grads import WeightGrads, bind
from moe_dualpipe.models import ModelConfig, StageOptions, build_model, next_token_loss
from moe_dualpipe.overlap.host_syncs import host_syncs
from tests.support.kernels import DEVICE, FLOOR, LinearExperts, error

TINY = {
    "hidden_size": 16, "num_layers": 2, "num_dense_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
    "dense_size": 24, "expert_size": 8, "num_experts": 4, "experts_per_token": 2, "vocab_size": 32, "init_std": 0.3,
}  # fmt: skip


def tokens(seed):
    return torch.randint(0, 32, (1, 6), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def model(kernels, recompute="none", **changes):
    config = ModelConfig(**{**TINY, **changes})
    return build_model(config, options=StageOptions(seed=1, recompute=recompute, kernels=kernels)).to(DEVICE)


@pytest.mark.parametrize("changes", [
    {}, {"router_score": "sigmoid", "expert_groups": 2, "top_groups": 1},
    {"experts": "tests.support.kernels:LinearExperts"},
], ids=["plain", "groups", "custom experts"])  # fmt: skip
@pytest.mark.parametrize("recompute", ["none", "norms", "full"])
@pytest.mark.quick("none-plain", "none-custom experts")
def test_forward_and_backward(recompute, changes):
    """Deferred weight gradients have the same bits."""
    losses, gradients = [], []
    for kernels, deferred in (("reference", False), ("triton", False), ("triton", True)):
        module, weight_grads = model(kernels, recompute=recompute, **changes), WeightGrads()
        bind(module, weight_grads)
        assert {m.kernels for m in module.modules() if isinstance(m, LinearExperts)} <= {kernels}
        loss = next_token_loss(module(tokens(1)), tokens(2))
        with weight_grads.defer_to("later") if deferred else nullcontext():
            loss.backward()
        if deferred:
            weight_grads.run_deferred("later")
        losses.append(loss.item())
        gradients.append([p.grad for p in module.parameters()])
    assert losses[1] == losses[2] == pytest.approx(losses[0], rel=1e-6)
    for reference, ours, again in zip(*gradients, strict=True):
        assert error(ours, reference) <= 3 * FLOOR[torch.float32] and torch.equal(ours, again)


@pytest.mark.skipif(DEVICE == "cuda", reason="a capture fails at a host sync")
def test_forward_and_backward_have_no_host_sync(monkeypatch):
    """So a CUDA graph can capture them."""
    monkeypatch.setattr(local_backend, "count_choices", lambda *_: None)  # as on a GPU
    monkeypatch.setattr(ExpertOrder, "trimmed", lambda _order: pytest.fail("a host sync"))
    module = model("triton")
    with host_syncs("cpu") as found:
        next_token_loss(module(tokens(1)), tokens(2)).backward()
    assert not found


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_an_expanded_gradient_is_dispatched(kernels):
    ep = Loopback(4, 2, kernels=kernels)
    x, ids = torch.randn(5, 8, device=DEVICE, requires_grad=True), torch.tensor([[0, 1], [0, 3], [2, 3]] * 2)[:5]
    route = ep.prepare(ids.to(DEVICE))
    x_ND, _ = dispatch(x, torch.ones(5, 2, device=DEVICE), route, ep)
    combine(x_ND, route, ep).sum().backward()  # the gradient of a sum is expanded and has stride 0
    assert x.grad.tolist() == [[ranks] * 8 for ranks in (1, 2, 1, 1, 2)]
