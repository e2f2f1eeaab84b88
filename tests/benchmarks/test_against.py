"""benchmarks/against.py: its programs train the same model, and a program that trains another one is noticed."""

import dataclasses
import itertools

import pytest

from benchmarks import against
from moe_dualpipe.checkpoint.huggingface.config import find_architecture
from moe_dualpipe.models import ModelConfig

QWEN = ModelConfig(
    vocab_size=37, hidden_size=24, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=4, dense_size=20, expert_size=12,
    num_experts=5, experts_per_token=2, num_shared_experts=2, shared_gate=True,
    init_std=0.4,  # so that every operator matters to the loss
)  # fmt: skip
OLMOE = dataclasses.replace(
    QWEN, num_dense_layers=0, num_shared_experts=0, shared_gate=False, num_kv_heads=6, qk_norm="full",
    normalize_weights=False,
)  # fmt: skip
PROGRAMS = ["ours", "hf grouped_mm", "hf our experts"]
clock = itertools.count().__next__


@pytest.mark.quick("True-olmoe")
@pytest.mark.parametrize("model", [QWEN, OLMOE], ids=["qwen2_moe", "olmoe"])
@pytest.mark.parametrize("update", [True, False])
def test_all_programs_have_the_same_losses_in_every_step(model, update):
    size = against.Size(model, (2, 19), update)
    with against.built(size, PROGRAMS) as steps:
        seconds = against.measure(size, steps, 3, clock)
    assert [*seconds] == PROGRAMS
    assert set(seconds["ours"]) == {1}  # a step reads the clock twice
    table = against.rows("name", 1, size, seconds)
    assert [row[:4] for row in table[:2]] == [["name", "1", program, "1000"] for program in PROGRAMS[:2]]
    assert table[1][5:] == ["38", "1.00", "1.00 to 1.00"]


def test_hugging_face_has_the_models():
    for size in against.SIZES.values():
        find_architecture(size.model)


def test_a_program_with_another_loss_is_an_error():
    size = against.Size(QWEN, (2, 19), update=True)
    other = dataclasses.replace(size, update=False)
    with (
        against.built(size, ["hf grouped_mm"]) as steps,
        against.built(other, ["ours"]) as without_updates,
        pytest.raises(AssertionError, match="ours"),
    ):
        against.measure(size, steps | {"ours": without_updates["ours"]}, 3, clock)
