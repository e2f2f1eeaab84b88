"""The options of published models in pipelines: tied embeddings, dense layers anywhere, biases, gates, YaRN.

A tied weight is the embedding of the first stage and the head of the last. If one rank holds both, it is one parameter;
otherwise its two holders are replicas. It must get the gradients of both uses once, and count once in the norm.
"""

from dataclasses import replace

import pytest

from tests.support import pipelines
from tests.support.ranks import run_ranks

CONFIG = replace(
    pipelines.CONFIG, num_layers=4, num_dense_layers=1, dense_layers=(2,), tied_embeddings=True, qkv_bias=True,
    rotary_fraction=0.5, shared_gate=True, yarn_factor=4.0, yarn_positions=8,
)  # fmt: skip


def with_options(rank, function, *args):
    pipelines.CONFIG, pipelines.MICRO_BATCHES = CONFIG, 4
    return function(rank, *args)


def holders_of_the_embedding(rank, name, pp):
    *_, sets = pipelines.make_pipeline(rank, name, pp)
    return [replicas.num_replicas for replicas in sets if "embedding.weight" in replicas.parameters]


def results_and_holders(rank, names, pp, fused_loss):
    seen = pipelines.all_schedules_equal_reference(rank, names, pp, fused_loss)
    return seen, {name: holders_of_the_embedding(rank, name, pp) for name in names}


@pytest.mark.parametrize("pp,names,fused_loss", [
    (1, ["dualpipev"], True),
    (2, ["dualpipe", "dualpipev", "1f1b", "zb1p", "interleaved_1f1b"], False),
    (2, ["dualpipe", "1f1b"], True),
    (4, ["chimera"], False),
])  # fmt: skip
@pytest.mark.quick("4-names3-False")
def test_a_pipeline_equals_the_single_process_model(pp, names, fused_loss):
    seen = run_ranks(pp, with_options, results_and_holders, names, pp, fused_loss)
    for name in names:
        assert sorted(m for on_rank, _ in seen for m in on_rank[name][0]) == list(range(4)), name
        holders = [held[name] for _, held in seen]
        at_first = [[1]] + [[]] * (pp - 1)  # rank 0 holds the first and the last stage
        at_both = [[2], *[[]] * (pp - 2), [2]]
        assert holders == (at_first if name == "dualpipev" else at_both), name


def test_with_expert_parallelism_it_agrees_with_the_single_process_model():
    seen = run_ranks(2, with_options, pipelines.agrees, "dualpipev", 1, 2, 2)
    assert sum(count for count, _ in seen) == 2 * 4


def all_with_a_frozen_embedding(rank):
    return pipelines.all_schedules_equal_reference(rank, ["1f1b", "zb1p"], 2, False, "embedding")


def test_a_tied_weight_may_be_frozen():
    seen = run_ranks(2, with_options, all_with_a_frozen_embedding)
    assert all(sorted(m for on_rank in seen for m in on_rank[name][0]) == list(range(4)) for name in seen[0])
