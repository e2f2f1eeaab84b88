"""benchmarks/against.py: its programs train the same model, and a program that trains another one is noticed."""

import dataclasses
import itertools
import weakref
from contextlib import contextmanager

import pytest
from torch import nn

from benchmarks import against
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
PROGRAMS = [against.PLAIN, "ours", "hf eager", "hf grouped_mm", against.PRODUCTS]
clock = itertools.count().__next__


@pytest.mark.quick("True-olmoe")
@pytest.mark.parametrize("model", [QWEN, OLMOE], ids=["qwen2_moe", "olmoe"])
@pytest.mark.parametrize("update", [True, False])
def test_all_programs_have_the_same_losses_in_every_step(model, update):
    size = against.Size(model, (2, 19), update)
    with against.built(size, PROGRAMS) as steps:
        seconds = against.measure(size, steps, 3, clock)
    assert [*seconds] == PROGRAMS
    # A step reads the clock twice. Forward and backward of the qkv projection alone are three products.
    assert set(seconds["ours"]) == {1}
    assert all(value > 3 * model.num_layers for value in seconds[against.PRODUCTS])
    table = against.rows("name", 1, size, seconds)
    assert [row[:4] for row in table[:2]] == [["name", "1", "plain", "1000"], ["name", "1", "ours", "1000"]]
    assert table[1][5:] == ["38", "1.00", "1.00 to 1.00"]


def test_a_program_with_another_loss_is_an_error():
    size = against.Size(QWEN, (2, 19), update=True)
    other = dataclasses.replace(size, update=False)
    with (
        against.built(size, ["plain"]) as steps,
        against.built(other, ["ours"]) as without_updates,
        pytest.raises(AssertionError, match="ours"),
    ):
        against.measure(size, steps | {"ours": without_updates["ours"]}, 3, clock)


def test_programs_are_measured_together_with_the_update_and_else_in_pairs():
    size = against.Size(QWEN, (2, 19), update=True)
    pairs = dataclasses.replace(size, update=False)
    plain, *others = against.PROGRAMS
    assert plain == against.PLAIN
    assert against.groups(size) == [[plain, *others]]
    assert against.groups(pairs) == [[plain, name] for name in others]
    for only in (("ours", "plain"), ("ours",)):
        assert against.groups(size, only) == [["plain", "ours", "matrix products"]]
        assert against.groups(pairs, only) == [["plain", "ours"], ["plain", "matrix products"]]


def test_each_pair_is_freed_before_the_next_and_has_ratios_to_its_own_plain(monkeypatch):
    monkeypatch.setitem(against.SIZES, "size", against.Size(QWEN, (2, 19)))
    built, alive = [], []

    @contextmanager
    def pair(_size, names):
        model = nn.Linear(1, 1)
        alive.append(sum(old() is not None for old in built))
        built.append(weakref.ref(model))
        yield dict.fromkeys(names, model)

    def measure(_size, steps, _rounds, _clock):
        return {name: [len(built) * (1.0 if name == "plain" else 3.0)] * 2 for name in steps}

    monkeypatch.setattr(against, "built", pair)
    monkeypatch.setattr(against, "measure", measure)
    rows = [*against.compare("size", 1, against.Options(only=tuple(PROGRAMS)))]
    assert [row[2] for row in rows] == PROGRAMS and alive == [0] * 4
    assert [row[3] for row in rows] == ["1000", "3000", "6000", "9000", "1.2e+04"]
    assert [row[6] for row in rows] == ["1.00", "3.00", "3.00", "3.00", "3.00"]
