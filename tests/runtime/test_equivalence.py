"""A pipeline of any schedule and size computes the same as the single-process model.

Losses of each micro-batch are bit-equal. Gradients agree within 1e-13 cosine distance for every parameter, because
micro-batches may be added in another order. Real processes, gloo.
"""

from dataclasses import replace

import pytest
import torch

from moe_dualpipe.models import StageOptions, build_model, next_token_loss
from moe_dualpipe.overlap import WeightGrads
from moe_dualpipe.runtime import P2P, Executor
from moe_dualpipe.runtime.replicas import check_equal, differing
from moe_dualpipe.schedule import NAMES
from tests.support.pipelines import (
    CONFIG,
    MICRO_BATCHES,
    SEED,
    agrees,
    all_schedules_equal_reference,
    batch,
    make_pipeline,
)
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("pp,fused_loss", [(1, False), (2, False), (4, False), (1, True), (2, True)])
@pytest.mark.quick("2-True")
def test_a_pipeline_of_any_schedule_equals_the_single_process_model(pp, fused_loss):
    names = [name for name in NAMES if pp > 1 or name not in ("chimera", "dualpipe")]
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


@pytest.mark.long
def test_data_parallel_without_expert_parallel_agrees():
    run_ranks(2, agrees, "dualpipev", 1, 2, 1)


def replicas_that_drifted(rank):
    *_, sets = make_pipeline(rank, "dualpipe", 2)
    assert [differing(replicas) for replicas in sets] == [{}, {}, {}]
    parameters = dict(sets[0].parameters)
    name = "layers.3.attention.qkv.weight"
    if rank == 1:
        with torch.no_grad():
            value = parameters[name][0, 0]
            value.copy_(torch.nextafter(value, torch.tensor(9.0)))
    assert [differing(replicas) for replicas in sets] == [{name: [0, 1]}, {}, {}]
    with pytest.raises(RuntimeError, match=rf"ranks 0, 1 disagree in {name}: replicas must stay bit-equal"):
        check_equal(sets[0])


def test_one_bit_of_drift_between_replicas_is_an_error():
    run_ranks(2, replicas_that_drifted)


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


def test_bf16_model_accumulates_gradients_in_fp32():
    model = build_model(replace(CONFIG, num_layers=3), options=StageOptions(seed=SEED)).bfloat16()
    for p in model.parameters():
        p.grad_dtype = torch.float32
    executor = Executor({0: model}, P2P.connect(None, [], torch.device("cpu")))
    x, y = (t[0] for t in batch())
    singles = {}
    for i in range(3):
        with executor.weight_grads.defer_to(i):
            next_token_loss(model(x), y).backward()
        executor.weight_grads.run_deferred(i)
        if i == 0:
            singles = {n: p.grad.clone() for n, p in model.named_parameters()}
    for key, p in model.named_parameters():
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad, singles[key] + singles[key] + singles[key], rtol=0, atol=0, msg=key)
