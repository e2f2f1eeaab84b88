"""A pipeline of any schedule and size computes the same as the single-process model.

Losses of each micro-batch are bit-equal. Gradients agree within 1e-13 cosine distance for every parameter, because
micro-batches may be added in another order. Real processes, gloo.

With a tied head or multi-token prediction, the last stage has the embedding, too. If one rank holds both ends, the
embedding is one parameter; otherwise its two holders are replicas. It must get the gradients of both uses once, and
count once in the norm. Nothing that precedes the first trained parameter needs a gradient, so a first stage may have no
backward at all.
"""

from dataclasses import replace

import pytest

from moe_dualpipe.models import build_model
from moe_dualpipe.schedule import NAMES
from tests.support import pipelines
from tests.support.kernels import needs_onednn, small_products_in_onednn
from tests.support.ranks import run_ranks

SMALL = replace(pipelines.CONFIG, num_layers=4, num_dense_layers=1)
MODELS = {
    "plain": pipelines.CONFIG,
    "uneven": replace(SMALL, num_layers=6),
    "tied": replace(
        SMALL, dense_layers=(2,), tied_embeddings=True, qkv_bias=True, rotary_fraction=0.5, shared_gate=True,
        yarn_factor=4.0, yarn_positions=8,
    ),
    "mtp": replace(SMALL, mtp_layers=2, mtp_weight=0.7), "onednn": SMALL,
}  # fmt: skip
ANY = [*NAMES, "dualpipe+fill", "interleaved_1f1b+fill"]
ALONE = [name for name in NAMES if name not in ("chimera", "dualpipe")]
PAIRED = ["dualpipe", "1f1b"]


def of_model(rank, model, function, *args):
    pipelines.CONFIG, pipelines.MICRO_BATCHES = MODELS[model], 8 if model == "plain" else 4
    if model == "onednn":
        small_products_in_onednn(pytest.MonkeyPatch())
    return function(rank, *args)


@pytest.mark.parametrize("model,pp,names,fused_loss", [
    ("plain", 1, ALONE, False), ("plain", 1, ALONE, True), ("plain", 4, ANY, False), ("uneven", 2, ANY, True),
    pytest.param("onednn", 2, ["dualpipe"], True, marks=needs_onednn),
    *((model, 1, ["dualpipev"], True) for model in ("tied", "mtp")),
    *((model, 2, [*PAIRED, "dualpipev", "zb1p", "interleaved_1f1b"], False) for model in ("tied", "mtp")),
    *((model, 2, PAIRED, True) for model in ("tied", "mtp")),
    *((model, 4, ["chimera", "1f1b"], False) for model in ("tied", "mtp")),
])  # fmt: skip
@pytest.mark.quick("uneven-2-names3-True", "tied-2-names9-True", "mtp-2-names10-True")
def test_a_pipeline_of_any_schedule_equals_the_single_process_model(model, pp, names, fused_loss):
    seen = run_ranks(pp, of_model, model, pipelines.all_schedules_equal_reference, names, pp, fused_loss)
    micro_batches = [*range(8 if model == "plain" else 4)]
    for name in names:
        for i in range(2):
            assert sorted(m for on_rank in seen for m in on_rank[name][i]) == micro_batches, name
        if model in ("tied", "mtp"):
            ends = {0} if name == "dualpipev" else {0, pp - 1}
            assert [on_rank[name][2] for on_rank in seen] == [
                [len(ends)] if rank in ends else [] for rank in range(pp)
            ], name


@pytest.mark.parametrize("model,name,pp,dp,ep,fused_loss", [
    ("plain", "dualpipev", 1, 2, 2, False), ("plain", "1f1b", 2, 2, 2, False), ("uneven", "dualpipe", 2, 2, 2, True),
    ("tied", "dualpipev", 1, 2, 2, False), ("mtp", "dualpipev", 1, 2, 2, False),
])  # fmt: skip
@pytest.mark.quick("uneven-dualpipe-2-2-2-True")
def test_with_expert_parallelism_it_agrees(model, name, pp, dp, ep, fused_loss):
    """A fused loss agrees with the plain model."""
    seen = run_ranks(pp * dp, of_model, model, pipelines.agrees, name, pp, dp, ep, fused_loss)
    assert sum(count for count, _ in seen) == dp * (8 if model == "plain" else 4)
    everything = {name for name, _ in build_model(MODELS[model]).named_parameters()}
    assert set.union(*(names for _, sets in seen for names in sets)) == everything


@pytest.mark.long
@pytest.mark.parametrize("model,frozen,fused_loss", [
    ("plain", r"^embedding|^layers\.[0-3]\.", False), ("plain", r"^(?!head)", True), ("tied", "embedding", False)
])  # fmt: skip
def test_trained_parameters_of_a_partly_frozen_model_get_their_gradients(model, frozen, fused_loss):
    """With overlapped pairs, and with weight gradients deferred by a split backward."""
    names = ["zb1p", "dualpipe"]
    run_ranks(2, of_model, model, pipelines.all_schedules_equal_reference, names, 2, fused_loss, frozen)


@pytest.mark.long
def test_ranks_that_share_experts_agree_on_their_transfers():
    """Before an all-to-all, something is trained on one rank and nothing on the other."""
    all_but_the_second_ranks_experts = r"^(?!.*experts\..*\.[345]$)"
    run_ranks(2, pipelines.agrees, "dualpipev", 1, 2, 2, False, all_but_the_second_ranks_experts)
