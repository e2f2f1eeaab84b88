"""Multi-token prediction (MTP) in a pipeline equals the single-process model; the last stage has the embedding, too.

If one rank holds both ends, the embedding is one parameter; otherwise its two holders are replicas. It must get the
gradients of both uses once, and count once in the norm.
"""

from dataclasses import replace

import pytest

from tests.support import pipelines
from tests.support.ranks import run_ranks

CONFIG = replace(pipelines.CONFIG, num_layers=4, num_dense_layers=1, mtp_layers=2, mtp_weight=0.7)


def with_mtp(rank, function, *args):
    pipelines.CONFIG, pipelines.MICRO_BATCHES = CONFIG, 4
    return function(rank, *args)


def sizes_of_sets(rank, name, pp, dp):
    *_, sets = pipelines.make_pipeline(rank, name, pp, dp)
    return [replicas.num_replicas if "embedding.weight" in replicas.parameters else 0 for replicas in sets]


def results_and_set_sizes(rank, names, pp, fused_loss):
    seen = pipelines.all_schedules_equal_reference(rank, names, pp, fused_loss)
    return seen, {name: sizes_of_sets(rank, name, pp, 1) for name in names}


@pytest.mark.parametrize("pp,names,fused_loss", [
    (1, ["dualpipev"], True),
    (2, ["dualpipe", "dualpipev", "1f1b", "zb1p", "interleaved_1f1b"], False),
    (4, ["chimera", "1f1b"], False),
])  # fmt: skip
@pytest.mark.quick("4-names2-False")
def test_a_pipeline_equals_the_single_process_model(pp, names, fused_loss):
    seen = run_ranks(pp, with_mtp, results_and_set_sizes, names, pp, fused_loss)
    for name in names:
        assert sorted(m for on_rank, _ in seen for m in on_rank[name][0]) == list(range(4)), name
        holders = [sizes[name] for _, sizes in seen]
        apart, mirrored = name in ("1f1b", "zb1p", "interleaved_1f1b"), name in ("dualpipe", "chimera")
        ends = {0, pp - 1} if apart or mirrored else {0}
        assert [sum(sizes) for sizes in holders] == [len(ends) if rank in ends else 0 for rank in range(pp)], name


@pytest.mark.long
def test_with_expert_parallelism_it_agrees_with_the_single_process_model():
    seen = run_ranks(2, with_mtp, pipelines.agrees, "dualpipev", 1, 2, 2)
    assert sum(count for count, _ in seen) == 2 * 4
