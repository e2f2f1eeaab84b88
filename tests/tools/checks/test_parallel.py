"""`check parallel` passes for the model, and names the first layer, segment and tensor that a fault changes."""

from dataclasses import replace

import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.schedule import NAMES
from moe_dualpipe.tools.checks import Variant, check_parallel
from moe_dualpipe.tools.checks.run import (
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
DIFFERS, AGREE = (
    "the first difference",
    "all tensors between segments agree, so the fault is in a weight gradient or in ",
)
FOUND = {
    "double gradients": f"{DIFFERS} is in step 1, layer 2, segment dispatch, input gradient 0: 12 of 12 tokens differ",
    "swap experts": f"{DIFFERS} is in step 1, layer 2, segment combine, output 0: ",
    "keep stale bias": f"{DIFFERS}: buffers differ by 1, above the tolerance of 1e-05: layers.1.mlp.router.",
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
