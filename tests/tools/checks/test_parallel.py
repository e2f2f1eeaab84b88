"""`check parallel` passes for the model, and names the first layer, segment and tensor that a fault changes."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from moe_dualpipe.cli import main
from moe_dualpipe.schedule import NAMES
from moe_dualpipe.tools.checks import check_parallel
from moe_dualpipe.tools.checks.first_difference import StepTrace, verdict
from moe_dualpipe.tools.checks.parallel import make_job
from moe_dualpipe.tools.checks.run import (
    OTHER_ORDER,
    OTHER_ROWS,
    SAME_ORDER,
    Variant,
    default_variants,
    find_difference,
    micro_batches_for,
    record_reference,
    requested_variant,
)
from moe_dualpipe.training.config import BatchConfig, ParallelConfig, TrainConfig
from tests.support.parallel_faults import FAULTS, MODEL, inject, moe

CONFIG = TrainConfig(model=MODEL, batch=BatchConfig(seq_len=6))
EXPERTS = Variant("ep=2", OTHER_ROWS, dp=2, ep=2, schedule="1f1b")
PIPELINE = Variant("pp=2", OTHER_ORDER, pp=2, schedule="1f1b")
DIFFERS, AGREE = (
    "the first difference",
    "all tensors between segments agree, so the fault is in a weight gradient or in ",
)
FOUND = {
    "double gradients": f"{DIFFERS} is in step 1, layer 2, segment dispatch, input gradient 0: 12 of 12 tokens differ",
    "swap experts": f"{DIFFERS} is in step 1, layer 2, segment combine, output 0: ",
    "keep stale bias": f"{DIFFERS}: buffers differ by 1, above the tolerance of 0: layers.1.mlp.router.",
    "other weights": f"{DIFFERS}: weights differ by 1.4, above the tolerance of 0: layers.1.mlp.experts.down.",
    "corrupt transfer": f"{DIFFERS} is in step 1, layer 2, segment attn, output 0: 6 of 12 tokens differ",
    "forget sum": f"{AGREE}its sum over ranks: gradients differ by ",
    "double weight gradient": f"{AGREE}its sum over ranks: gradients differ by ",
    "fail": "rank 1: tests/support/parallel_faults.py:",
}
DETAILS = {
    "double gradients": ", 2 times the reference, at position ", "keep stale bias": "bias_E after step 1 on rank 1",
    "double weight gradient": "layers.2.mlp.experts.down.3 on rank 1", "fail": "layer 2",
}  # fmt: skip


@pytest.mark.long
def test_each_fault_is_located_and_runs_without_one_pass():
    variants = [replace(PIPELINE if name == "corrupt transfer" else EXPERTS, name=name) for name in FAULTS]
    report = check_parallel(CONFIG, [*variants, EXPERTS, PIPELINE], inject)
    checks = {check.name: check for check in report.checks}
    assert checks["ep=2"].status == checks["pp=2"].status == "passed"
    assert checks["pp=2"].measured == "losses equal, logits equal, gradients equal"
    for fault, where in FOUND.items():
        problem = checks[fault].problem
        assert checks[fault].status == "failed" and problem.startswith(where), problem
        assert DETAILS.get(fault, "") in problem


OPTIONS = (
    "--seq-len 6 --set model.vocab_size=31 --set model.hidden_size=16 --set model.num_layers=2 --set model.num_heads=2 "
    "--set model.num_kv_heads=1 --set model.head_dim=8 --set model.dense_size=24 --set model.expert_size=12 "
    "--set model.num_experts=3"
)


def test_the_command_checks_the_requested_layout_and_skips_what_cannot_run(capsys, monkeypatch):
    variants = [Variant("shuffled sequences", OTHER_ROWS, neighbors=1), EXPERTS, replace(PIPELINE, name="pp=4", pp=4)]
    monkeypatch.setattr("moe_dualpipe.tools.checks.parallel.default_variants", lambda _: variants)
    assert (
        main(["check", "parallel", *OPTIONS.split(), "--pp", "2", "--set", "parallel.overlap=false", "--document-mask"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 steps of 16 sequences of 6 tokens, compared with one process")
    assert [line.split("  ")[0] for line in lines[2:] if line[0] != " "] == [
        "pp=2 x ep=1, dualpipe, no overlap", "shuffled sequences", "ep=2", "pp=4", "2 passed, 2 skipped",
    ]  # fmt: skip
    assert "    --ep 2 does not divide 3 experts: use --ep 1" in lines
    assert any(line.startswith("    2 layers cannot be divided over 4 pipeline stages") for line in lines)


@pytest.mark.parametrize("options,message", [
    ("--pp 3 --schedule dualpipe", "dualpipe needs an even number of pipeline ranks: got 3; use 4"),
    ("--ep 3", "--ep 3 does not divide 8 experts: use --ep 2"),
    ("--pp 16", "4 layers cannot be divided over 16 pipeline stages"),
    ("--dtype bfloat16", "check parallel computes in float64, because rounding in bfloat16 hides faults"),
    ("--experts nowhere:Experts", "nowhere"),
    ("--speed 3", "unknown option '--speed'"),
])  # fmt: skip
def test_invalid_options_exit_with_code_2(capsys, options, message):
    assert main(["check", "parallel", *options.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("moe-dualpipe: error: ") and error.count("\n") == 1 and message in error


def test_the_requested_layout_is_that_of_training():
    found = requested_variant(ParallelConfig(pp=3, ep=2, overlap=False), "full")
    assert found is not None and (found.pp, found.dp, found.ep, found.schedule) == (3, 2, 2, "dualpipev")
    assert (found.processes, found.overlap, found.recompute, found.tolerance) == (6, False, "full", OTHER_ROWS)
    found = requested_variant(ParallelConfig(), "norms")
    assert found is not None and (found.schedule, found.tolerance) == ("dualpipev", OTHER_ORDER)
    assert requested_variant(ParallelConfig(), "none") is None
    assert micro_batches_for([Variant("ep=4", OTHER_ROWS, dp=4, ep=4), Variant("pp=3", OTHER_ORDER, pp=3)]) == 8
    assert micro_batches_for([Variant("pp=5", OTHER_ORDER, pp=5)]) == 10
    assert micro_batches_for([Variant(f"dp={dp}", OTHER_ORDER, dp=dp) for dp in (2, 3)]) == 12


def test_the_default_variants_have_every_schedule_and_run_with_the_same_sequences():
    assert {variant.schedule for variant in default_variants(1) if variant.pp == 2} == {*NAMES}
    for size in (1, 2, 3):
        variants = default_variants(size)
        assert {variant.processes for variant in variants} == {1, 2, 4}
        assert len({variant.name for variant in variants}) == len(variants)
        sequences = micro_batches_for(variants) * size
        assert all(sequences % (variant.dp * (variant.size or size)) == 0 for variant in variants)


# ---- What counts as a difference from the reference's results, and which tensor is the first that differs ----


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
        trace = StepTrace(results(), tolerance)
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
    record_reference(job, file)
    _, problem = find_difference(job, file, variant)
    assert problem.startswith(where and f"the first difference is in step 1, {where}") and bool(problem) == bool(where)
