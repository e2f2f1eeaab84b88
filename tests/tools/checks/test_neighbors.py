"""Layers whose results depend on the other sequences of a micro-batch, or on how often they ran, in one process."""

from dataclasses import replace

import pytest
import torch.distributed as dist
from moe_dualpipe.tools.checks.compare import compare, find_faults
from moe_dualpipe.tools.checks.recorder import Recorder

from moe_dualpipe.tools.checks.first_difference import Recorded, first_difference
from moe_dualpipe.tools.checks.parallel import make_job
from moe_dualpipe.tools.checks.run import run_variant
from moe_dualpipe.tools.checks.variants import OTHER_ROWS, REFERENCE, SAME_ORDER, Variant
from moe_dualpipe.training.config import BatchConfig, TrainConfig
from tests.support.parallel_faults import MODEL, moe

ALONE = Variant("each sequence alone", OTHER_ROWS, size=1)
NEIGHBORS = Variant("shuffled sequences", OTHER_ROWS, neighbors=1)
RECOMPUTE = Variant("recompute attention", SAME_ORDER, recompute="attention")


@pytest.fixture(autouse=True, scope="module")
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def normalize_over_the_batch(run):
    layer = moe(run, 2)
    original = layer.shared.forward
    layer.shared.forward = lambda x_TD: original(x_TD) - original(x_TD).mean(0)


def read_another_sequence(run):
    attention = run.stages[0].layers["1"].attention
    original = attention.forward
    attention.forward = lambda x_BSD, **context: original(x_BSD, **context) + 0.1 * x_BSD.roll(1, 0)


def drop_rows_above_the_capacity(run):
    """Experts that take at most five rows: which rows are dropped depends on the other sequences."""
    experts = moe(run, 1).experts
    original = experts.forward

    def forward(x_ND, order, weights_NK):
        weights_NK = weights_NK.clone()
        for expert in range(len(order.expert_offsets) - 1):
            start, stop = order.expert_offsets[expert : expert + 2].tolist()
            choices = order.choice_idx_M[start:stop][5:]
            weights_NK.view(-1)[choices] = 0
        return original(x_ND, order, weights_NK)

    experts.forward = forward


def count_calls(run):
    attention = run.stages[0].layers["2"].attention
    original, calls = attention.forward, []

    def forward(x_BSD, **context):
        calls.append(1)
        return original(x_BSD, **context) + 0.01 * len(calls)

    attention.forward = forward


def found(patch, variant):
    """The first difference between the variant and the reference, both with the patch."""
    config = TrainConfig(model=MODEL, batch=BatchConfig(seq_len=6))
    job = replace(make_job(config, [variant]), on_rank=patch)
    recorders = [Recorder(), Recorder()]
    results, expected = (
        run_variant(job, one, recorder.observe) for one, recorder in zip((variant, REFERENCE), recorders, strict=True)
    )
    run, reference = (Recorded(recorder.records, MODEL.num_experts) for recorder in recorders)
    _, faults = find_faults([compare(results, expected)], variant.tolerance)
    first = first_difference(run, reference, variant.tolerance, faults)
    assert bool(first) == bool(faults)
    return first


@pytest.mark.parametrize("variant", [NEIGHBORS, RECOMPUTE], ids=lambda variant: variant.name)
def test_nothing_differs_without_a_fault(variant):
    assert found(None, variant) == ""


@pytest.mark.parametrize("patch,variant,where", [
    (normalize_over_the_batch, ALONE, "layer 2, segment mlp, output 0: 24 of 24 tokens differ; the largest"),
    (read_another_sequence, NEIGHBORS, "layer 1, segment attn, output 0: "),
    (drop_rows_above_the_capacity, ALONE, "layer 1, segment mlp number 2, output 0: "),
    (count_calls, RECOMPUTE, "layer 2, segment attn, output 0: "),
], ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
def test_a_layer_that_depends_on_its_neighbors_or_its_calls_is_located(patch, variant, where):
    assert found(patch, variant).startswith(f"the first difference is in step 1, {where}")
