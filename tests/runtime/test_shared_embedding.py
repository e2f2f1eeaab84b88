"""Pipelines whose last stage has the embedding, too, with a tied head or multi-token prediction; and frozen parts.

If one rank holds both ends, the embedding is one parameter; otherwise its two holders are replicas. It must get the
gradients of both uses once, and count once in the norm. Nothing that precedes the first trained parameter needs a
gradient, so a first stage may have no backward at all.
"""

from dataclasses import replace

import pytest

from tests.support import pipelines
from tests.support.ranks import run_ranks

SMALL = replace(pipelines.CONFIG, num_layers=4, num_dense_layers=1)
MODELS = {
    "tied": replace(
        SMALL, dense_layers=(2,), tied_embeddings=True, qkv_bias=True, rotary_fraction=0.5, shared_gate=True,
        yarn_factor=4.0, yarn_positions=8,
    ),
    "mtp": replace(SMALL, mtp_layers=2, mtp_weight=0.7),
}  # fmt: skip
ALL = ["dualpipe", "dualpipev", "1f1b", "zb1p", "interleaved_1f1b"]


def with_model(rank, model, function, *args):
    pipelines.CONFIG, pipelines.MICRO_BATCHES = MODELS[model], 4
    return function(rank, *args)


def results_and_holders(rank, names, pp, fused_loss):
    seen = pipelines.all_schedules_equal_reference(rank, names, pp, fused_loss)
    pieces = {name: pipelines.make_pipeline(rank, name, pp)[-1] for name in names}
    return seen, {
        name: [one.num_replicas for one in sets if "embedding.weight" in one.parameters]
        for name, sets in pieces.items()
    }


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pp,names,fused_loss", [
    (1, ["dualpipev"], True), (2, ALL, False), (2, ["dualpipe", "1f1b"], True), (4, ["chimera", "1f1b"], False),
])  # fmt: skip
@pytest.mark.quick("4-names3-False-tied", "4-names3-False-mtp")
def test_a_pipeline_equals_the_single_process_model_and_both_ends_have_one_embedding(model, pp, names, fused_loss):
    seen = run_ranks(pp, with_model, model, results_and_holders, names, pp, fused_loss)
    for name in names:
        assert sorted(m for on_rank, _ in seen for m in on_rank[name][0]) == [*range(4)], name
        ends = {0} if name == "dualpipev" else {0, pp - 1}
        assert [held[name] for _, held in seen] == [[len(ends)] if r in ends else [] for r in range(pp)], name


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_with_expert_parallelism_it_agrees_with_the_single_process_model(model):
    seen = run_ranks(2, with_model, model, pipelines.agrees, "dualpipev", 1, 2, 2)
    assert sum(count for count, _ in seen) == 2 * 4


def test_a_tied_weight_may_be_frozen():
    arguments = ["1f1b", "zb1p"], 2, False, "embedding"
    seen = run_ranks(2, with_model, "tied", pipelines.all_schedules_equal_reference, *arguments)
    assert all(sorted(m for on_rank in seen for m in on_rank[name][0]) == [*range(4)] for name in seen[0])


@pytest.mark.long
@pytest.mark.parametrize("frozen,fused_loss", [(r"^embedding|^layers\.[0-3]\.", False), (r"^(?!head)", True)])
def test_trained_parameters_of_a_partly_frozen_model_get_their_gradients(frozen, fused_loss):
    """With overlapped pairs, and with weight gradients deferred by a split backward."""
    run_ranks(2, pipelines.all_schedules_equal_reference, ["zb1p", "dualpipe"], 2, fused_loss, frozen)


@pytest.mark.long
def test_ranks_that_share_experts_agree_on_their_transfers():
    """Before an all-to-all, something is trained on one rank and nothing on the other."""
    all_but_the_second_ranks_experts = r"^(?!.*experts\..*\.[345]$)"
    run_ranks(2, pipelines.agrees, "dualpipev", 1, 2, 2, False, all_but_the_second_ranks_experts)
