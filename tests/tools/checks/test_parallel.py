"""`check parallel` passes for the model, and names the first layer, segment and tensor that a fault changes."""

import re
from dataclasses import replace

import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.schedule import NAMES
from moe_dualpipe.tools.checks import Check, Report, Variant, check_parallel
from moe_dualpipe.tools.checks.parallel import make_job
from moe_dualpipe.tools.checks.variants import (
    OTHER_ORDER,
    OTHER_ROWS,
    default_variants,
    micro_batches_for,
    requested_variant,
)
from moe_dualpipe.training.config import BatchConfig, ParallelConfig, TrainConfig
from tests.support.parallel_faults import FAULTS, MODEL, inject

CONFIG = TrainConfig(model=MODEL, batch=BatchConfig(seq_len=6))
EXPERTS = Variant("ep=2", OTHER_ROWS, dp=2, ep=2, schedule="1f1b")
PIPELINE = Variant("pp=2", OTHER_ORDER, pp=2, schedule="1f1b")
DIFFERS = "the first difference"
FOUND = {
    "double gradients": " is in step 1, layer 2, segment dispatch, input gradient 1: 48 of 48 tokens differ",
    "drop row": " is in step 1, layer 1, segment combine, output 0: 2 of 48 tokens differ",
    "swap experts": " is in step 1, layer 2, segment combine, output 0: ",
    "keep stale bias": ": buffers differ by 1, above the tolerance of 1e-05: layers.1.mlp.router.bias_E on rank 1",
    "mix rows": " is in step 1, layer 1, segment combine, output 0: 4 of 48 tokens differ",
    "other weights": ": weights differ by 1.4, above the tolerance of 0: layers.1.mlp.experts.down.",
    "corrupt transfer": " is in step 1, layer 2, segment attn, input 0: 4 of 48 tokens differ",
}
DETAILS = {
    "double gradients": ", 2 times the reference, at position ",
    "swap experts": "tokens differ; they are the tokens of experts 2, 3 (ep rank 1); the largest",
}
GRADIENTS = {"forget sum": "layers.", "double weight gradient": "layers.2.mlp.experts.down.3 on rank 1"}


@pytest.fixture(scope="module")
def checks():
    """The checks of all faults, by name, from one run."""
    variants = [replace(PIPELINE if name == "corrupt transfer" else EXPERTS, name=name) for name in FAULTS]
    report = check_parallel(CONFIG, [*variants, EXPERTS, PIPELINE], inject, searched=len(variants))
    return {check.name: check for check in report.checks}


@pytest.mark.parametrize("fault", FOUND)
@pytest.mark.long
def test_a_fault_is_located(checks, fault):
    assert checks[fault].status == "failed"
    assert checks[fault].problem.startswith(DIFFERS + FOUND[fault])
    assert DETAILS.get(fault, "") in checks[fault].problem


@pytest.mark.parametrize("fault", GRADIENTS)
@pytest.mark.long
def test_a_fault_of_a_weight_gradient_or_its_sum_is_told_from_others(checks, fault):
    assert checks[fault].status == "failed"
    assert re.match(
        "all tensors between segments agree, so the fault is in a weight gradient or in its sum over ranks: "
        rf"gradients differ by \S+, above the tolerance of 4.5e-06: {GRADIENTS[fault]}",
        checks[fault].problem,
    )


@pytest.mark.long
def test_variants_without_a_fault_pass(checks):
    assert checks["ep=2"].status == checks["pp=2"].status == "passed"
    assert checks["pp=2"].measured.startswith("losses equal, logits equal, gradients ")


@pytest.mark.long
def test_a_choice_that_rounding_changed_is_a_warning(checks):
    assert checks["break a tie"].status == "warning"
    assert checks["break a tie"].problem.startswith("float32 results differ and float64 results agree")


@pytest.mark.long
def test_a_rank_that_fails_does_not_end_the_other_checks(checks):
    assert checks["fail"].status == "failed"
    place = "tests/support/parallel_faults.py:"
    assert checks["fail"].problem.startswith("rank 1: " + place) and "layer 2" in checks["fail"].problem


@pytest.mark.long
def test_measured_numbers_are_shown_only_if_results_differ(checks):
    assert checks["corrupt transfer"].measured.startswith("losses 0.32 of 0, logits ")


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
        "pp=2 x ep=1, dualpipe, no overlap", "shuffled sequences", "ep=2", "pp=4", "2 checks passed, 2 skipped",
    ]  # fmt: skip
    assert "    --ep 2 does not divide 3 experts: use --ep 1" in lines
    assert any(line.startswith("    2 layers cannot be divided over 4 pipeline stages") for line in lines)


def test_a_failed_check_exits_with_code_1(capsys, monkeypatch):
    report, configs = Report("model", (Check("ep=2", "failed"),)), []
    monkeypatch.setattr(
        "moe_dualpipe.commands.check.check_parallel", lambda config: configs.append(config) or report, raising=False
    )
    assert main(["check", "parallel"]) == 1
    assert configs[0].batch.seq_len == 16
    assert capsys.readouterr().out == f"{report}\n"


@pytest.mark.parametrize("options,message", [
    ("--pp 3 --schedule dualpipe", "dualpipe needs an even number of pipeline ranks: got 3; use 4"),
    ("--ep 3", "--ep 3 does not divide 8 experts: use --ep 2"),
    ("--pp 16", "4 layers cannot be divided over 16 pipeline stages"),
    ("--dtype bfloat16", "check parallel computes in float32, because rounding in bfloat16 hides faults"),
    ("--experts nowhere:Experts", "nowhere"),
    ("--speed 3", "unknown option '--speed'"),
])  # fmt: skip
def test_invalid_options_exit_with_code_2(capsys, options, message):
    assert main(["check", "parallel", *options.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("moe-dualpipe: error: ") and error.count("\n") == 1 and message in error


def test_the_default_variants_have_every_schedule_and_recomputation_with_and_without_overlap():
    variants = default_variants(1)
    assert {v.schedule for v in variants if v.pp == 2} == {*NAMES}
    assert {v.recompute for v in variants} == {"none", "norms", "attention", "full"}
    for ep in (1, 2):
        assert {v.overlap for v in variants if v.ep == ep and v.processes > 1} == {True, False}
        assert any(v.neighbors for v in variants if v.ep == ep)


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


def test_documents_end_in_the_checked_sequences():
    config = replace(CONFIG, batch=BatchConfig(seq_len=6, document_mask=True))
    job = make_job(config, [Variant("pp=2", OTHER_ORDER, pp=2)])
    assert job.options.document_end_id == MODEL.vocab_size - 1
    assert 0.05 < (job.tokens == MODEL.vocab_size - 1).double().mean() < 0.3


def test_all_variants_run_with_the_same_sequences():
    for size in (1, 2, 3):
        variants = default_variants(size)
        assert {variant.processes for variant in variants} == {1, 2, 4}
        assert len({variant.name for variant in variants}) == len(variants)
        sequences = micro_batches_for(variants) * size
        assert all(sequences % (variant.dp * (variant.size or size)) == 0 for variant in variants)
