"""Each feature of a run: bit-identical when resumed or with options that save time or memory; equal in any layout."""

import dataclasses

import pytest

from moe_dualpipe.checkpoint import read_manifest
from moe_dualpipe.training.config import OptimizerConfig
from tests.support import special_experts
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, SHALLOW, change, losses, settings, train_each, without_clocks

MUON = OptimizerConfig("muon", lr=0.05, warmup_steps=0)
RUN = {"steps": 3, "seq_len": 16, "eval_sequences": 4, "save_every": 2}
TIED = dataclasses.replace(
    MODEL, num_layers=3, tied_embeddings=True, shared_gate=True, qkv_bias=True, num_dense_layers=0, dense_layers=(0,),
    router_bias=True, sequence_loss=0.02, z_loss=0.003,
)  # fmt: skip


def with_experts(name):
    return dataclasses.replace(SHALLOW, experts=name if isinstance(name, str) else special_experts.named(name))


FEATURES = {
    "mtp": {"model": dataclasses.replace(SHALLOW, mtp_layers=1, vocab_size=1009), "fused_loss": True},
    "tied": {"model": TIED, "bias_rate": 0.01},
    "documents": {"document_mask": True},
    "frozen": {"model": with_experts(special_experts.LowRankExperts), "optim": MUON},
    "buffers": {"model": with_experts(special_experts.ScaledExperts)},
    "lists": {"model": with_experts("tests.support.custom_experts:ListsOfStacks")},
    "shared": {"model": with_experts("tests.support.custom_experts:Stacked")},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8": {"fp8": "experts+dispatch"},
}
MOVES = {"pp": 1, "ep": 2, "move_experts_every": 2, "move_experts_gain": 0.0, "steps": 5, "save_every": 3}
"""Experts have moved before the checkpoint, and the next decision counts loads from before it."""
SAVINGS = [{"overlap": False, "recompute": "full"}, {"max_deferred": 1, "wgrad": "late", "zero": False}]
KINDS = {"loss": 1e-5, "grad_norm": 1e-4, "validation_loss": 1e-5, "mtp_loss": 1e-5, "z_loss": 1e-5}
ONLY_BIT_IDENTICAL = {"buffers": [{"zero": False}], "bfloat16": SAVINGS, "frozen": SAVINGS, "fp8": SAVINGS}
"""In another layout, bf16, FP8 and Muon round otherwise, and dropout draws otherwise, also in another order."""


def test_moves_of_experts_resume_bit_for_bit(tmp_path):
    first = settings(tmp_path / "first", **{**RUN, **MOVES})
    resumed = change(
        first, out=str(tmp_path / "second"), resume=str(tmp_path / "first" / "checkpoints" / "step-000003")
    )
    whole, rest = run_ranks(2, train_each, [first, resumed])[0]
    moved = [record["moved_experts"] for record in whole if "moved_experts" in record]
    assert len(moved) == 2 and moved[0] > 0
    assert without_clocks(rest)[1:] == without_clocks(whole)[4:]
    last = "checkpoints/step-000005"
    assert len({read_manifest(tmp_path / name / last).checksum for name in ("first", "second")}) == 1


@pytest.fixture
def data(tmp_path):
    """Documents of a few tokens: every sequence has the ends of some."""
    (tmp_path / "text").mkdir()
    for i in range(200):
        (tmp_path / "text" / f"{i}.txt").write_text(f"{i * i} is the square of {i}."[: 5 + i % 17])
    return (str(tmp_path / "text"),)


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.quick("mtp")
def test_a_feature_resumes_bit_for_bit_and_is_the_same_in_every_layout(tmp_path, data, name):
    first = settings(tmp_path / "first", data=data, **RUN, **FEATURES[name])
    half = str(tmp_path / "first" / "checkpoints" / "step-000002")
    savings = ONLY_BIT_IDENTICAL.get(name, SAVINGS)
    shared = {"cp": 2, "pp": 1, "schedule": "1f1b"}  # sequences
    changes = [{"resume": half}, *savings, {"pp": 1, "ep": 2}, {**shared, "resume": half}, shared]
    changes.append({"resume": str(tmp_path / str(len(changes) - 1) / "checkpoints" / "step-000002")})
    configs = [first, *(change(first, out=str(tmp_path / str(i)), **one) for i, one in enumerate(changes))]
    whole, rest, *runs = run_ranks(2, train_each, configs)[0]
    assert [*losses(whole)] == [1, 2, 3]
    assert without_clocks(rest)[1:] == without_clocks(whole)[3:]
    for run, one in zip(runs, savings, strict=False):
        assert without_clocks(run) == without_clocks(whole), one
    if name in ONLY_BIT_IDENTICAL:
        return
    alone = [change(first, out=str(tmp_path / each), resume=resume) for each, resume in (("a", None), ("b", half))]
    for run in (*runs[len(savings) :], *run_ranks(1, train_each, alone)[0]):
        for kind, rel in KINDS.items():
            found = {step: loss for step, loss in losses(run, kind).items() if step > 2}
            assert found == pytest.approx({step: losses(whole, kind)[step] for step in found}, rel=rel), kind
    if name == "mtp":  # before any training, and as a mean over micro-batches
        assert losses(whole, "mtp_loss")[1] == pytest.approx(losses(whole)[1], rel=0.05)
