"""Overlap, recomputation and deferral change no bit of a loss or a gradient, whatever the layers are."""

from dataclasses import replace

import pytest
import torch

from moe_dualpipe.expert_parallel import Loopback
from moe_dualpipe.kernels.weight_grads import WeightGrads, bind
from moe_dualpipe.models import RECOMPUTE, ModelConfig, StageOptions, build_model
from moe_dualpipe.models.config import LoRA
from moe_dualpipe.models.recompute import recompute_saved
from tests.support.own_layers import ParallelBlock

PLAIN = ModelConfig(
    vocab_size=31, hidden_size=16, num_layers=3, num_dense_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
    dense_size=24, expert_size=12, num_experts=4, experts_per_token=2, init_std=0.3,
)  # fmt: skip
MODELS = {
    "options of published models": (
        replace(
            PLAIN, dense_layers=(2,), qkv_bias=True, out_bias=True, rotary_fraction=0.5, shared_gate=True,
            tied_embeddings=True, yarn_factor=4.0, yarn_positions=8,
        ),
        {"fused_loss": True},
    ),
    "latent queries": (replace(PLAIN, attention="mla", q_rank=9, kv_rank=6, rope_dim=4, value_dim=7), {}),
    "documents": (PLAIN, {"documents": torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, -1]])}),
    "router losses": (replace(PLAIN, router_dtype="float32", sequence_loss=0.1, z_loss=0.1, router_bias=True), {}),
    "multi-token prediction": (replace(PLAIN, mtp_layers=2), {"fused_loss": True}),
    "adapters": (PLAIN, {"lora": LoRA(3)}),
    "a block of one's own": (replace(PLAIN, block=ParallelBlock), {}),
}  # fmt: skip


def batch(seed):
    tokens_BL = torch.randint(31, (2, 9), generator=torch.Generator().manual_seed(seed))
    return tokens_BL[:, :-1], tokens_BL[:, 1:]


def trained(config, how, documents=None, **options):
    """Both losses and all gradients of two micro-batches: the first backward is alone, deferred or in a pair."""
    model, weight_grads = build_model(config, Loopback(4, 2), StageOptions(seed=3, **options)), WeightGrads()
    bind(model, weight_grads)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or ".lora." in name:  # biases, norms and adapters: not their initial values
                parameter.add_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))
    (x1, y1), (x2, y2) = batch(1), batch(2)
    given = () if documents is None else (documents,)
    first = model.loss(model(x1, *given), y1)
    if how == "in a pair":
        _, second = model.overlapped_forward_backward(model, [x2, *given], model.loss, [y2], model, first, None, None)
    elif how == "deferred":
        with weight_grads.defer_to("later"):
            first.backward()
        assert weight_grads.has_deferred("later")
        weight_grads.run_deferred("later")
        second = model.loss(model(x2, *given), y2)
    else:
        first.backward()
        second = model.loss(model(x2, *given), y2)
    second.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {"first": first.detach(), "second": second.detach()} | grads


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.quick(
    "options of published models", "latent queries", "documents", "multi-token prediction", "adapters",
    "a block of one's own",
)  # fmt: skip
def test_overlap_recompute_and_deferral_change_no_bit(name):
    config, options = MODELS[name]
    expected = trained(config, "alone", recompute="none", **options)
    assert all(gradient is not None and gradient.any() for gradient in expected.values())
    ways = [("none", "deferred"), ("full", "deferred"), *((recompute, "in a pair") for recompute in RECOMPUTE)]
    for recompute, how in ways:  # the second backward is alone
        for key, gradient in trained(config, how, recompute=recompute, **options).items():
            assert torch.equal(gradient, expected[key]), (recompute, how, key)


@pytest.mark.parametrize("part", [lambda y: y[:1], lambda y: y.T, lambda y: y.view(2, 8)])
def test_a_view_of_a_recomputed_tensor_is_saved_itself(part):
    y = torch.randn(4, 4)
    w = torch.randn_like(part(y)).requires_grad_()
    with recompute_saved(y, y.clone):
        out = part(y) * w
    out.sum().backward()
    assert torch.equal(w.grad, part(y))
