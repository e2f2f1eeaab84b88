"""What counts as a difference from the reference's results, and which tensor is the first that differs."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from moe_dualpipe.tools.checks.first_difference import Results, Trace, compare, find_difference, find_faults
from moe_dualpipe.tools.checks.parallel import make_job
from moe_dualpipe.tools.checks.run import OTHER_ORDER, OTHER_ROWS, REFERENCE, SAME_ORDER, Variant, run_variant
from moe_dualpipe.training.config import BatchConfig, TrainConfig
from tests.support.parallel_faults import MODEL, moe

NAN = float("nan")


def results(**changes) -> Results:
    """Two sequences of three tokens each in one micro-batch, two parameters and two buffers. Changes are added."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    made = Results(
        weights={"up": draw(3, 2), "down": draw(2)}, logits={(0, s): draw(3, 5) for s in (0, 1)},
        losses={(0, s): draw(3).abs() for s in (0, 1)}, buffers={"load": torch.tensor([3, 4]), "bias": draw(2)},
        gradients={"up": draw(3, 2), "down": draw(2)},
    )  # fmt: skip
    for kind, (key, change) in changes.items():
        values = getattr(made, kind)
        values[key] = values[key] + change
    return made


def faults(*ranks, tolerance=OTHER_ORDER):
    return find_faults([compare(rank, results()) for rank in ranks], results(), tolerance)


def test_equal_results_have_no_fault():
    measured, found = faults(results(), results(), tolerance=SAME_ORDER)
    assert measured == "losses equal, logits equal, gradients equal" and found == {}
    near = results(logits=((0, 0), 1e-6), losses=((0, 0), 1e-7))
    assert faults(near, tolerance=OTHER_ROWS)[1] == {} and len(faults(near)[1]) == 2


@pytest.mark.parametrize("kind,key,change,fault", [
    ("weights", "up", 1e-6, "weights differ by "),
    ("losses", (0, 1), torch.tensor([0, 0, 1e-5]), "position 2 of sequence 1 in step 1"),
    ("logits", (0, 0), torch.tensor([[0], [0], [NAN]]), "logits differ by inf, above the tolerance of 0: position 2"),
    ("buffers", "load", 1, "buffers differ by "),
    ("gradients", "down", 1e-3, "above the tolerance of 4.5e-07: down"),
])  # fmt: skip
def test_a_difference_on_any_rank_is_a_fault(kind, key, change, fault):
    wrong = results(**{kind: (key, change)})
    for ranks in ([wrong, results()], [results(), wrong]):
        (found,) = faults(*ranks)[1].values()
        assert fault in found


def test_what_no_rank_has_is_a_fault():
    first, second = results(), results()
    del first.gradients["up"], second.gradients["down"]
    assert faults(first, second)[1] == {}
    del second.gradients["up"], first.gradients["down"]
    (found,) = faults(first, second)[1].values()
    assert found.startswith("gradients: no rank has down and 1 more")


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
def test_a_layer_that_depends_on_its_neighbors_or_its_calls_is_located(patch, variant, where):
    config = TrainConfig(model=MODEL, batch=BatchConfig(seq_len=6))
    job, recorded = replace(make_job(config, [variant]), on_rank=patch), Trace()
    reference = run_variant(job, REFERENCE, recorded)
    trace = Trace(recorded.tensors, variant.tolerance.tokens)
    found = run_variant(job, variant, trace)
    _, problem = find_difference(found, reference, variant.tolerance, lambda: trace)
    assert problem.startswith(where and f"the first difference is in step 1, {where}") and bool(problem) == bool(where)
