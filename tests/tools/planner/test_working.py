"""What is saved with fp8, and what a backward needs only while it runs: laws that hold for any sizes."""

import dataclasses

import pytest
from moe_dualpipe.tools.planner.backward_memory import mlp_working, working_bytes

from moe_dualpipe.models import ModelConfig, StageSpec
from moe_dualpipe.tools.planner import MicroBatch
from moe_dualpipe.tools.planner.activations import block_bytes, deferred_attention, deferred_mlp, saved_bytes

CONFIG = ModelConfig(
    vocab_size=37, hidden_size=20, num_layers=6, num_dense_layers=0, num_heads=6, num_kv_heads=3, head_dim=10,
    expert_size=11, num_experts=6, experts_per_token=3, num_shared_experts=0,
)  # fmt: skip


def stage(layers: int) -> StageSpec:
    return StageSpec(range(layers), True, False, 1.0)


@pytest.mark.parametrize("recompute", ["attention", "full"])
def test_fp8_saves_nothing_where_no_input_of_a_product_is_saved(recompute):
    """On one rank, without shared experts: attention is recomputed, and no message holds the received rows."""
    sizes = {saved_bytes(CONFIG, stage(3), MicroBatch(2, 8, recompute=recompute, fp8=fp8)) for fp8 in (False, True)}
    assert len(sizes) == 1


@pytest.mark.parametrize("ep,plain,rows", [(1, True, 1), (1, False, 2), (2, True, 2), (2, False, 2)])
def test_only_plain_pairs_on_one_rank_drop_the_output_of_their_stage(ep, plain, rows):
    spec, batch = stage(3), MicroBatch(2, 8, ep=ep, plain=plain)
    ends = saved_bytes(CONFIG, spec, batch) - sum(block_bytes(CONFIG, spec, layer, batch) for layer in spec.layers)
    assert ends == batch.tokens * (8 + rows * CONFIG.hidden_size * batch.element)  # the tokens' ids are 8 bytes each


def test_gradients_of_plain_experts_are_those_of_one_rank_only():
    """With a single token, the sum of weight gradients is the most: in fp32, for gate and up of each local expert."""
    sizes = [mlp_working(CONFIG, 0, MicroBatch(1, 1, ep=ep, plain=True)) for ep in (1, 2, 3)]
    assert sizes == [4 * 2 * 11 * 20 * experts for experts in (6, 3, 2)]


def test_deferred_gradients_of_every_block_add_to_the_peak():
    """If they need more than a block frees, the peak is at the first block: another block adds the difference."""
    batch, spec = MicroBatch(2, 8, recompute="full"), stage(5)
    more = deferred_mlp(CONFIG, 2, batch) + deferred_attention(CONFIG, batch) - block_bytes(CONFIG, spec, 2, batch)
    assert more > 0
    four, five = (working_bytes(CONFIG, stage(layers), batch, deferring=True) for layers in (4, 5))
    assert five - four == more


def test_the_deferred_gradient_of_logits_counts_once():
    """With one token in the vocabulary, a fused loss saves as much as another one. The gradient of the stage's output
    lasts until the end: of the hidden states with a fused loss, otherwise of the logits, which is deferred anyway."""
    config = dataclasses.replace(CONFIG, vocab_size=1)
    spec = dataclasses.replace(stage(5), head=True)
    unfused, fused = (
        working_bytes(config, spec, MicroBatch(2, 8, recompute="full", fused_loss=fused), deferring=True)
        for fused in (False, True)
    )
    assert fused - unfused == 16 * config.hidden_size * 2
