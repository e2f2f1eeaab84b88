"""The formulas of what is kept against the tensors that are there after a real forward, with the Triton kernels."""

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_dualpipe.expert_parallel import Loopback
from moe_dualpipe.kernels.weight_grads import WeightGrads, bind
from moe_dualpipe.models import ModelConfig, StageOptions, StageSpec, TransformerStage
from moe_dualpipe.planner.activations import MicroBatch, deferred_bytes, saved_bytes
from tests.support.kernels import DEVICE

B, S, D, V = 2, 16, 24, 20
SIZES = {
    "vocab_size": V, "hidden_size": D, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
    "dense_size": 56, "expert_size": 16, "num_experts": 6, "experts_per_token": 3,
}  # fmt: skip
# Values as wide as keys: for others a CPU has no flash attention.
LATENT = {"attention": "mla", "kv_rank": 12, "rope_dim": 4, "value_dim": 12}
FIRST = StageSpec(range(2), True, False, 0.4)
MIDDLE = StageSpec(range(3), False, False, 0.5)  # of a model whose embedding is elsewhere
LAST = StageSpec(range(2, 4), False, True, 0.4)


class Made(TorchDispatchMode):
    """Every storage that is made in it."""

    def __init__(self, *known):
        super().__init__()
        self.kept = known  # whose addresses must not be used again
        self.known = {t.untyped_storage()._cdata for t in known}
        self.found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                key = storage._cdata
                if key not in self.found or self.found[key][0].expired():  # addresses are used again
                    self.found[key] = StorageWeakRef(storage), storage.nbytes() * (key not in self.known)
        return result

    def alive(self):
        gc.collect()  # Triton's interpreter leaves cycles
        return sum(size for ref, size in self.found.values() if not ref.expired())


class FusedNorm(torch.autograd.Function):
    """What RMSNorm keeps on a GPU; on a CPU it is a chain of operators that keeps more."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, rstd)
        return x * rstd * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight, rstd = ctx.saved_tensors
        normed, grad_normed = x * rstd, grad * weight
        grad_x = rstd * (grad_normed - normed * (grad_normed * normed).mean(-1, keepdim=True))
        return grad_x, (grad * normed).flatten(0, -2).sum(0), None


@pytest.fixture(autouse=True)
def fused_norms(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(nn.RMSNorm, "forward", lambda self, x: FusedNorm.apply(x, self.weight, self.eps))


def forward(config, spec, recompute, ep=None, fused_loss=False):
    """(what was made in a forward, the stage, its input, its loss or output)."""
    stage = TransformerStage(
        config, spec, ep, options=StageOptions(recompute=recompute, kernels="triton", fused_loss=fused_loss)
    ).to(DEVICE)
    bind(stage, WeightGrads())
    x = torch.randint(V, (B, S)) if spec.embedding else torch.randn(B, S, D)
    x, labels = x.to(DEVICE).requires_grad_(not spec.embedding), torch.randint(V, (B, S)).to(DEVICE)
    with Made(x, labels, *stage.parameters(), *stage.buffers()) as made:
        y = stage(x)
        y = stage.loss(y, labels) if spec.head else y
    return made, stage, x, y


def kept(config, spec, recompute, ep=None, fused_loss=False):
    """Bytes after a forward."""
    made, _stage, x, _y = forward(config, spec, recompute, ep, fused_loss)
    return made.alive() + x.nbytes + 8 * B * S * spec.head  # labels


def tables(config, spec):
    """What the formula leaves out: tables with an entry an expert, and a loss."""
    layers = sum(not config.is_dense(layer) for layer in spec.layers)
    return layers * 64 * (config.num_experts + 1) + 16 * spec.head


@pytest.mark.parametrize("spec,choices,recompute", [
    (FIRST, {"num_shared_experts": 0}, "attention"),
    (FIRST, {"qk_norm": "full", "num_shared_experts": 2}, "norms"),
    (MIDDLE, LATENT | {"q_rank": 20}, "none"),
    (LAST, {"qk_norm": "head"}, "none"),
    (LAST, {}, "full"),
], ids=["attention", "norms", "mla", "last", "full"])  # fmt: skip
def test_what_is_kept_for_the_backward(spec, choices, recompute):
    config = ModelConfig(**SIZES, **choices)
    there = kept(config, spec, recompute)
    formula = saved_bytes(config, spec, MicroBatch(B, S, element=4, recompute=recompute))
    assert 0 <= there - formula <= tables(config, spec)


def test_a_fused_loss_keeps_no_logits():
    config = ModelConfig(**SIZES | {"vocab_size": 200})
    there = kept(config, LAST, "full", fused_loss=True)
    formula = saved_bytes(config, LAST, MicroBatch(B, S, element=4, recompute="full", fused_loss=True))
    assert 0 <= there - formula <= tables(config, LAST)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_is_kept_where_rows_travel(recompute):
    config, spec = ModelConfig(**SIZES), MIDDLE
    there = kept(config, spec, recompute, Loopback(config.num_experts, 3, kernels="triton"))
    formula = saved_bytes(config, spec, MicroBatch(B, S, element=4, ep=3, recompute=recompute))
    assert there == pytest.approx(formula, rel=0.03)  # how many rows travel is random


@pytest.mark.parametrize("spec,choices,recompute", [
    (MIDDLE, LATENT | {"q_rank": 20}, "none"), (LAST, {"vocab_size": 200}, "full"),
], ids=["mla", "last"])  # fmt: skip
def test_what_is_kept_for_the_weights(spec, choices, recompute):
    config = ModelConfig(**SIZES | choices)
    made, stage, x, y = forward(config, spec, recompute)
    with made, stage.weight_grads.defer_to("later"):
        y.backward(torch.ones_like(y))
    del y
    known = [t.grad for t in (x, *stage.parameters()) if t.grad is not None]
    there = made.alive() - sum(grad.nbytes for grad in known)
    assert there == pytest.approx(
        deferred_bytes(config, spec, MicroBatch(B, S, element=4, recompute=recompute)), rel=0.05
    )
