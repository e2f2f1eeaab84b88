"""Router logits in fp32 in a bf16 model: choices, gradients, saved bytes, deferral, older checkpoints."""

import dataclasses

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_dualpipe.checkpoint.load import model_differences
from moe_dualpipe.kernels.linear import linear
from moe_dualpipe.kernels.weight_grads import WeightGrads
from moe_dualpipe.models import PRESETS, ModelConfig, build_model, split
from moe_dualpipe.models.router import Router
from moe_dualpipe.tools.planner.activations import MicroBatch, deferred_bytes, saved_bytes
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, losses, settings, train_each

T, D, E, K = 4096, 256, 64, 6


def make_router(dtype, **choices):
    torch.manual_seed(1)
    config = ModelConfig(hidden_size=D, num_experts=E, experts_per_token=K, router_dtype=dtype, **choices)
    return Router(config).bfloat16()


def make_tokens():
    return torch.randn(T, D, generator=torch.Generator().manual_seed(2)).bfloat16()


@pytest.mark.parametrize("choices", [{}, {"router_score": "sigmoid", "expert_groups": 8, "top_groups": 4}], ids=str)
def test_fp32_logits_choose_the_experts_that_exact_logits_choose(choices):
    x_TD, other = make_tokens(), {}
    for dtype in ("model", "float32"):
        router = make_router(dtype, **choices)
        exact_TE = x_TD.double() @ router.logits.weight.double().T
        _, expected_TK = router.choose(exact_TE, None)
        _, ids_TK = router(x_TD)
        other[dtype] = (ids_TK.sort().values != expected_TK.sort().values).any(-1).double().mean().item()
    assert other["float32"] == 0
    assert 0.01 < other["model"] < 0.1


def product(x, w, fp32):
    """The gradients of a scalar, with x and w in bf16 and the weight's gradient in fp32 as in training."""
    x, w = (t.detach().clone().requires_grad_() for t in (x, w))
    w.grad_dtype = torch.float32
    y = linear(x, w, None, fp32)
    assert y.dtype == (torch.float32 if fp32 else torch.bfloat16)
    (y.float().sin() * torch.arange(1.0, y.numel() + 1).view_as(y)).sum().backward()
    return x.grad, w.grad


def test_gradients_of_the_fp32_product_are_exact_up_to_the_dtype_of_x():
    x, w = torch.randn(7, 300).bfloat16(), torch.randn(5, 300).bfloat16()
    a, b = (t.double().requires_grad_() for t in (x, w))
    y = a @ b.T
    (y.sin() * torch.arange(1.0, y.numel() + 1).view_as(y)).sum().backward()
    grad_x, grad_w = product(x, w, True)
    assert (grad_x.dtype, grad_w.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(grad_x.double(), a.grad, rtol=2**-8, atol=1e-3)
    torch.testing.assert_close(grad_w.double(), b.grad, rtol=1e-4, atol=1e-2)
    rounded = product(x, w, False)[1]
    assert torch.dist(rounded.double(), b.grad) > 100 * torch.dist(grad_w.double(), b.grad)


def test_a_frozen_weight_gets_no_gradient_and_passes_it_on():
    x, w = torch.randn(7, 300).bfloat16().requires_grad_(), torch.randn(5, 300).bfloat16()
    linear(x, w, fp32=True).sin().sum().backward()
    assert w.grad is None
    expected = (x.double() @ w.double().T).cos() @ w.double()
    torch.testing.assert_close(x.grad.double(), expected, rtol=2**-8, atol=1e-3)


def test_the_fp32_product_of_fp32_and_fp64_is_the_plain_one():
    for dtype in (torch.float32, torch.float64):
        x, w = torch.randn(2, 3, 9, dtype=dtype), torch.randn(5, 9, dtype=dtype, requires_grad=True)
        plain, same = linear(x, w), linear(x, w, fp32=True)
        assert same.dtype == dtype
        assert torch.equal(plain, same)
        assert torch.equal(*(torch.autograd.grad(y.sin().sum(), w)[0] for y in (plain, same)))
    assert torch.autograd.gradcheck(
        lambda x, w: linear(x, w, fp32=True), [torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in "xw"]
    )


def test_autocast_does_not_lower_the_precision():
    x, w = torch.randn(3, 300), torch.randn(5, 300)
    expected = linear(x, w)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear(x, w, fp32=True), expected)
        assert linear(x, w).dtype == torch.bfloat16


@pytest.mark.parametrize("recompute", [False, True])
def test_deferred_gradients_of_the_fp32_product_are_bit_equal(recompute):
    x = torch.randn(40, 30).bfloat16().requires_grad_()
    grads = []
    for weight_grads in (None, WeightGrads()):
        w = torch.randn(5, 30, generator=torch.Generator().manual_seed(3)).bfloat16().requires_grad_()
        w.grad_dtype = torch.float32
        for key in range(2):  # the second is added to the first

            def run(x, w=w, weight_grads=weight_grads):
                return linear(x, w, weight_grads, True).tanh()

            y = checkpoint(run, x, use_reentrant=False) if recompute else run(x)
            if weight_grads is None:
                y.sum().backward()
            else:
                with weight_grads.defer_to(key):
                    y.sum().backward()
                assert weight_grads.has_deferred(key)
                weight_grads.run_deferred(key)
        assert w.grad.dtype == torch.float32
        grads.append(w.grad)
    assert torch.equal(*grads)


def saved_by(router, x):
    sizes = {}

    def note(t):
        sizes[t.data_ptr()] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        router(x)
    return sum(sizes.values())


def test_no_fp32_copy_of_the_input_is_saved_and_the_planner_counts_the_logits():
    x = make_tokens().requires_grad_()
    more = saved_by(make_router("float32"), x) - saved_by(make_router("model"), x)
    assert more <= T * E * 2
    batch, configs = MicroBatch(1, T), [make_router(dtype).config for dtype in ("model", "float32")]
    for count in (saved_bytes, deferred_bytes):
        plain, fp32 = (count(config, split(config, 1)[0], batch) for config in configs)
        assert fp32 - plain == 3 * T * E * 2  # three layers with experts
    deep = [deferred_bytes(c, split(c, 1)[0], MicroBatch(1, T, element=4)) for c in configs]
    assert deep[0] == deep[1]


def test_presets_of_deepseek_use_it():
    assert {name for name, config in PRESETS.items() if config.router_dtype == "float32"} == {
        "deepseek-v2-lite", "deepseek-v3",
    }  # fmt: skip


def test_checkpoints_without_the_option_load():
    """The DeepSeek presets of earlier versions had logits in the dtype of the model."""
    config = PRESETS["deepseek-v2-lite"]
    older = dataclasses.asdict(config)
    del older["router_dtype"]
    assert model_differences(older, config) == []
    assert ModelConfig(**older).router_dtype == "model"
    for other in ("model", "float32"):
        assert model_differences({**older, "router_dtype": other}, config) == []


def test_bf16_runs_with_overlap_and_deferral_are_bit_equal_to_sequential_ones(tmp_path):
    model = dataclasses.replace(MODEL, router_dtype="float32", sequence_loss=0.1)
    common = {"model": model, "dtype": "bfloat16", "steps": 2, "seq_len": 16, "eval_sequences": 1}
    changes = {"overlapped": {}, "sequential": {"overlap": False, "recompute": "attention"}}
    configs = [settings(tmp_path / name, **common, **change) for name, change in changes.items()]
    overlapped, sequential = (losses(run) | losses(run, "grad_norm") for run in run_ranks(2, train_each, configs)[0])
    assert len(overlapped) == 2
    assert overlapped == sequential


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_fp32_model_does_not_change(dtype):
    ids = torch.randint(256, (2, 9))
    first, second = (
        build_model(dataclasses.replace(MODEL, router_dtype=choice)).to(dtype) for choice in ("model", "float32")
    )
    for model in (first, second):
        model.loss(model(ids), ids).backward()
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
