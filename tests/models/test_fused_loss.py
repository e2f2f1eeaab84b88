"""A model with a fused head and loss trains and generates like the plain model, without logits in memory."""

from functools import partial

import pytest
import torch

from moe_dualpipe.kernels.cross_entropy import linear_cross_entropy
from moe_dualpipe.models import ModelConfig, StageOptions, build_model, transformer
from tests.support.ranks import cosine_distance
from tests.support.tensors import OperationStats

CONFIG = ModelConfig(
    vocab_size=601, hidden_size=16, num_layers=2, num_dense_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
    dense_size=24, expert_size=12, num_experts=4, experts_per_token=2, init_std=0.2,
)  # fmt: skip
B, S, CHUNK = 2, 11, 5


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch):
    monkeypatch.setattr(transformer, "linear_cross_entropy", partial(linear_cross_entropy, chunk_tokens=CHUNK))


def batch():
    return torch.randint(CONFIG.vocab_size, (2, B, S), generator=torch.Generator().manual_seed(1))


def trained(dtype, fused_loss):
    """Loss and gradients of one step."""
    model, (x, y) = build_model(CONFIG, options=StageOptions(seed=3, fused_loss=fused_loss)).to(dtype), batch()
    loss = model.loss(model(x), y)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


# Relative for the loss, cosine distance for gradients. In bf16 the two losses round gradients at different points.
@pytest.mark.parametrize(
    "dtype,of_loss,of_grads",
    [(torch.float64, 1e-14, 1e-14), (torch.float32, 1e-6, 1e-11), (torch.bfloat16, 1e-6, 1e-4)],
)
def test_loss_and_gradients_equal_those_of_the_plain_loss(dtype, of_loss, of_grads):
    (loss, grads), (expected, plain_grads) = trained(dtype, True), trained(dtype, False)
    assert loss.dtype == expected.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(loss, expected, rtol=of_loss, atol=0)
    assert grads.keys() == plain_grads.keys()
    for name, grad in grads.items():
        assert grad.dtype == dtype
        assert cosine_distance(grad, plain_grads[name]) < of_grads, name


@pytest.mark.parametrize("fused_loss", [True, False])
def test_only_the_plain_loss_makes_a_tensor_of_the_size_of_the_logits(fused_loss):
    model, (x, y) = build_model(CONFIG, options=StageOptions(fused_loss=fused_loss)), batch()
    with OperationStats() as seen:
        model.loss(model(x), y).backward()
        with torch.no_grad():
            model.loss(model(x), y)
    # Without logits, the largest tensor is the head's weight or its gradient.
    assert seen.max_numel == max(CONFIG.hidden_size, B * S * (not fused_loss)) * CONFIG.vocab_size
