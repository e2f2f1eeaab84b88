"""The model has the same losses and gradients with Triton kernels as with plain torch."""

import pytest
import torch
from torch.distributed import group

from moe_dualpipe.expert_parallel import AllToAll, Local, Loopback
from moe_dualpipe.expert_parallel.autograd import combine, dispatch
from moe_dualpipe.kernels.weight_grads import WeightGrads, bind
from moe_dualpipe.models import ModelConfig, MoE, StageOptions, build_model, next_token_loss
from tests.support.kernels import DEVICE, FLOOR, LinearExperts, error, record_programs
from tests.support.ranks import run_ranks

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


@pytest.mark.long
def test_num_sms_limits_the_products_of_the_model_and_changes_no_result(monkeypatch):
    programs = record_programs(monkeypatch)
    results, launched = [], []
    for num_sms in (None, 3):
        torch.manual_seed(1)
        options = StageOptions(kernels="triton", num_sms=num_sms)
        layer = MoE(ModelConfig(**TINY), Local(4, "triton"), 1, options).to(DEVICE)
        x = torch.randn(7, 16, generator=torch.Generator().manual_seed(2)).to(DEVICE).requires_grad_()
        y = layer(x)
        y.sum().backward()
        results.append([y, x.grad, *(p.grad for p in layer.parameters())])
        launched.append(programs.copy())
        programs.clear()
    assert len(launched[0]) == 6
    assert min(launched[0]) > 3
    assert launched[1] == [3] * 6
    for expected, ours in zip(*results, strict=True):
        assert torch.equal(ours, expected)
    with pytest.raises(ValueError, match="num_sms must be at least 1, or None for all: got 0"):
        StageOptions(num_sms=0)


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


def two_ranks(rank):
    results = []
    for kernels in ("reference", "triton"):
        module = model(kernels, AllToAll(4, group.WORLD, kernels))
        loss = next_token_loss(module(tokens(rank, 1, 4 + 3 * rank)), tokens(9 + rank, 1, 4 + 3 * rank))
        loss.backward()
        results.append((loss.item(), gradients(module)))
    (loss, expected), (our_loss, ours) = results
    assert our_loss == pytest.approx(loss, rel=1e-6)
    assert_same(ours, expected)


@pytest.mark.long
@pytest.mark.skipif(DEVICE == "cuda", reason="needs two GPUs")
def test_expert_parallel_ranks():
    run_ranks(2, two_ranks)


def test_an_invalid_kernels_option_raises_when_the_model_is_built():
    for build in (lambda: model("cuda"), lambda: Local(4, kernels="cuda"), lambda: Loopback(4, 2, kernels="cuda")):
        with pytest.raises(ValueError, match="kernels must be one of auto, triton, reference: got 'cuda'"):
            build()
