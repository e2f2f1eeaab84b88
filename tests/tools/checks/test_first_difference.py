"""What counts as a difference from the reference's results, and which tensor is the first that differs."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from moe_dualpipe.tools.checks.first_difference import Comparison, Trace, find_difference, record, verdict
from moe_dualpipe.tools.checks.parallel import make_job
from moe_dualpipe.tools.checks.run import OTHER_ORDER, OTHER_ROWS, REFERENCE, SAME_ORDER, Variant, run_variant
from moe_dualpipe.training.config import BatchConfig, TrainConfig
from tests.support.parallel_faults import MODEL, moe

NAN = float("nan")


def results(key=None, sequence=0, change=0.0):
    """Two sequences of three tokens each, two parameters and two buffers. The change is added to one tensor."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    made = {
        ("weights", "up"): {0: draw(3, 2)}, ("logits", "step 1, logits"): {s: draw(3, 5) for s in (0, 1)},
        ("losses", "step 1, losses"): {s: draw(3).abs() for s in (0, 1)}, ("buffers", "load"): {0: draw(2)},
        ("gradients", "up"): {0: draw(3, 2)}, ("gradients", "down"): {0: draw(2)},
    }  # fmt: skip
    if key is not None:
        made[key][sequence] = made[key][sequence] + change
    return made


def judged(*ranks, tolerance=OTHER_ORDER):
    traces = []
    for rank in ranks:
        trace = Trace(results(), tolerance)
        for (kind, name), tensors in rank.items():
            trace.see(kind, name, tensors)
        traces.append((trace.largest, trace.compared, trace.first))
    return verdict(traces, results(), tolerance)


def test_equal_results_have_no_fault():
    assert judged(results(), results()) == ("losses equal, logits equal, gradients equal", "")
    near = results(("logits", "step 1, logits"), 0, 1e-6)
    assert judged(near)[1] and not judged(near, tolerance=OTHER_ROWS)[1]


@pytest.mark.parametrize("key,sequence,change,fault", [
    (("weights", "up"), 0, 1e-6, "the first difference: weights differ by "),
    (("losses", "step 1, losses"), 1, torch.tensor([0, 0, 1e-5]), "is in step 1, losses: 1 of 6 tokens differ; the"),
    (("logits", "step 1, logits"), 0, torch.tensor([[0], [0], [NAN]]), "inf (tolerance 0), at position 2 of sequence"),
    (("buffers", "load"), 0, 1, "the first difference: buffers differ by "),
    (("gradients", "down"), 0, 1e-3, "above the tolerance of 4.5e-07: down"),
])  # fmt: skip
def test_a_difference_on_any_rank_is_a_fault(key, sequence, change, fault):
    wrong = results(key, sequence, change)
    for ranks in ([wrong, results()], [results(), wrong]):
        assert fault in judged(*ranks)[1]


def test_what_no_rank_has_is_a_fault():
    first, second = results(), results()
    del first["gradients", "up"], second["gradients", "down"]
    assert not judged(first, second)[1]
    del second["gradients", "up"], first["gradients", "down"]
    assert judged(first, second)[1].startswith("gradients: no rank has down and 1 more")


# ---- layers that depend on the other sequences of a micro-batch, or on how often they ran ----

ALONE = Variant("each sequence alone", OTHER_ROWS, size=1)
NEIGHBORS = Variant("shuffled sequences", OTHER_ROWS, neighbors=1)
RECOMPUTE = Variant("recompute attention", SAME_ORDER, recompute="attention")


@pytest.fixture(scope="module")
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
            weights_NK.view(-1)[order.choice_idx_M[start:stop][5:]] = 0
        return original(x_ND, order, weights_NK)

    experts.forward = forward


def count_calls(run):
    attention = run.stages[0].layers["2"].attention
    original, calls = attention.forward, []
    attention.forward = lambda x, **context: original(x, **context) + 0.01 * (calls.append(1) or len(calls))


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("patch,variant,where", [
    (None, NEIGHBORS, ""), (None, RECOMPUTE, ""),
    (normalize_over_the_batch, ALONE, "layer 2, segment mlp, output 0: 6 of 6 tokens differ; the largest"),
    (read_another_sequence, NEIGHBORS, "layer 1, segment attn, output 0: "),
    (drop_rows_above_the_capacity, ALONE, "layer 1, segment mlp number 2, output 0: "),
    (count_calls, RECOMPUTE, "layer 2, segment attn, output 0: "),
], ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
def test_a_layer_that_depends_on_its_neighbors_or_its_calls_is_located(patch, variant, where, tmp_path):
    job = replace(make_job(TrainConfig(model=MODEL, batch=BatchConfig(seq_len=6)), [variant]), on_rank=patch)
    file = tmp_path / "reference.pt"
    record(Comparison(partial(run_variant, job, REFERENCE), SAME_ORDER, file))
    _, problem = find_difference(Comparison(partial(run_variant, job, variant), variant.tolerance, file))
    assert problem.startswith(where and f"the first difference is in step 1, {where}") and bool(problem) == bool(where)
