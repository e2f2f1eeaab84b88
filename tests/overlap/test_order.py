"""The order in which the engine runs the segments of two chunks."""

import pytest
import torch

from moe_dualpipe.expert_parallel import Local, Loopback
from moe_dualpipe.overlap import WeightGrads, bind
from tests.support.pairs import assert_same, run_pair, stage, tokens

LAYER = "attn(F) mlp(B) dispatch(F) dispatch(B) mlp(W) mlp(F) attn(B) attn(W) combine(F)"


EAGER_LAYER = "attn(F) dispatch(F) mlp(B) dispatch(B) mlp(W) mlp(F) combine(F) attn(B)"


def order(first, second, queued):
    log = []
    hidden = torch.randn(1, 4, 16)
    x0, x1 = (tokens(1) if module.spec.embedding else hidden for module in (first, second))
    run_pair(first, second, x0, x1, True, queued, log)
    return " ".join(log)


def bare(layers, ep=None):
    return stage(layers, 0, ep or Loopback(8, 2), embedding=False, head=False, num_shared_experts=0)


def test_the_order_is_deepseeks():
    """Layer by layer, as in the annotations of DeepSeek's published training trace."""
    assert order(bare(3), bare(3), queued=True) == (
        f"add(B) combine(B) {LAYER} combine(B) {LAYER} combine(B) {LAYER} add(F)"
    )


def test_on_a_cpu_transfers_start_as_soon_as_their_input_exists():
    assert order(bare(2), bare(2), queued=False) == (
        f"add(B) combine(B) {EAGER_LAYER} combine(B) attn(W) {EAGER_LAYER} attn(W) add(F)"
    )


@pytest.mark.parametrize("queued", [True, False])
@pytest.mark.parametrize("layers", [(2, 2), (1, 3), (3, 1)])
def test_late_weight_gradients_follow_the_other_chunks_mlp_and_have_the_same_bits(layers, queued):
    logs, results = ([], []), []
    for log, late in zip(logs, (False, True), strict=True):
        first, second = (bare(count) for count in layers)
        bind(second, WeightGrads(late=late))
        x0, x1 = torch.randn(2, 1, 4, 16, generator=torch.Generator().manual_seed(1))
        results.append(run_pair(first, second, x0, x1, True, queued, log))
    early, late = (" ".join(log) for log in logs)
    combine = "" if queued else " combine(F)"  # also started before mlp(W)
    pairs = min(layers)
    assert early.count(f"mlp(W) mlp(F){combine}") == late.count(f"mlp(F){combine} mlp(W)") == pairs
    assert early.replace(f"mlp(W) mlp(F){combine}", f"mlp(F){combine} mlp(W)") == late
    assert_same(results[1], results[0])


def test_with_completed_transfers_the_backward_runs_first():
    """Without expert parallelism, the backward runs before the forward, so that its gradient can be sent."""
    assert order(bare(2, Local(8)), bare(1, Local(8)), queued=False) == (
        "add(B) combine(B) mlp(B) dispatch(B) mlp(W) attn(B) attn(W) "
        "attn(F) dispatch(F) mlp(F) combine(F) attn(F) dispatch(F) mlp(F) combine(F) add(F)"
    )


def test_the_longer_chunk_continues_alone():
    assert order(bare(1), bare(2), queued=True) == (
        f"add(B) combine(B) {LAYER} combine(B) add(F) mlp(B) dispatch(B) mlp(W) attn(B) attn(W)"
    )
    assert order(bare(2), bare(1), queued=True) == (
        f"add(B) combine(B) {LAYER} attn(F) dispatch(F) mlp(F) combine(F) add(F)"
    )


def test_weight_gradients_of_the_head_run_during_the_first_transfer_and_shared_experts_during_the_others():
    model = stage(1, 0, embedding=False)
    assert order(model, model, queued=True) == (
        "loss(B) head(B) combine(B) head(W) attn(F) mlp(B) mlp(B) dispatch(F) dispatch(B) mlp(W) mlp(W) mlp(F) mlp(F) "
        "attn(B) attn(W) combine(F) head(F) loss(F)"
    )
