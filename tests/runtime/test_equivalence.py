"""A pipeline of any schedule and size computes the same as the single-process model.

Losses of each micro-batch are bit-equal. Gradients agree within 1e-13 cosine distance for every parameter, because
micro-batches may be added in another order. Real processes, gloo.
"""

import pytest
import torch

from moe_dualpipe.models import StageOptions, build_model, next_token_loss
from moe_dualpipe.overlap import WeightGrads
from moe_dualpipe.runtime import P2P, Executor
from moe_dualpipe.schedule import NAMES
from tests.support.pipelines import (
    CONFIG,
    MICRO_BATCHES,
    SEED,
    agrees,
    all_schedules_equal_reference,
    batch,
)
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("pp,fused_loss", [(1, False), (2, False), (4, False), (1, True), (2, True)])
@pytest.mark.quick("2-True")
def test_a_pipeline_of_any_schedule_equals_the_single_process_model(pp, fused_loss):
    names = [name for name in NAMES if pp > 1 or name not in ("chimera", "dualpipe")]
    names += ["dualpipe+fill", "interleaved_1f1b+fill"] if pp > 1 else []
    seen = run_ranks(pp, all_schedules_equal_reference, names, pp, fused_loss)
    for name in names:
        assert sorted(m for on_rank in seen for m in on_rank[name][0]) == list(range(MICRO_BATCHES)), name
        assert sorted(m for on_rank in seen for m in on_rank[name][1]) == list(range(MICRO_BATCHES)), name


@pytest.mark.parametrize("name,pp,dp,ep", [("dualpipev", 1, 2, 2), ("dualpipe", 2, 2, 2), ("1f1b", 2, 2, 2)])
@pytest.mark.quick("dualpipe-2-2-2")
def test_expert_parallel_pipeline_agrees(name, pp, dp, ep):
    seen = run_ranks(pp * dp, agrees, name, pp, dp, ep)
    assert sum(count for count, _ in seen) == dp * MICRO_BATCHES
    assert all(len(dense) > 0 and len(experts) > 0 for _, (dense, experts, _) in seen)


@pytest.mark.parametrize("name,pp,ep", [("dualpipev", 1, 1), ("dualpipe", 2, 1), ("dualpipe", 2, 2)])
@pytest.mark.quick("dualpipe-2-1")
def test_a_pipeline_with_a_fused_loss_agrees_with_the_plain_model(name, pp, ep):
    seen = run_ranks(pp * ep, agrees, name, pp, ep, ep, True)
    assert set.union(*(names for _, sets in seen for names in sets)) == {
        n for n, _ in build_model(CONFIG).named_parameters()
    }


def test_the_split_backward_is_used_and_changes_nothing():
    """Deferred weight gradients are computed later, and equal those of one backward."""
    model = build_model(CONFIG, options=StageOptions(seed=SEED))
    executor = Executor({0: model}, P2P.connect(None, [], torch.device("cpu")))
    weight_grads: WeightGrads = executor.weight_grads
    x, y = (t[0] for t in batch())
    with weight_grads.defer_to("later"):
        next_token_loss(model(x), y).backward()
    deferred = [n for n, p in model.named_parameters() if p.grad is None]
    assert {n.split(".", 2)[2] for n in deferred if n.startswith("layers.5")} == {
        "attention.qkv.weight", "attention.out.weight", "mlp.router.logits.weight", "mlp.experts.gate_up",
        "mlp.experts.down", "mlp.shared.gate_up.weight", "mlp.shared.down.weight",
    }  # fmt: skip
    weight_grads.run_deferred("later")
    plain = build_model(CONFIG, options=StageOptions(seed=SEED))
    next_token_loss(plain(x), y).backward()
    for (key, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, q.grad), key
