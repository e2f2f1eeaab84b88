"""Whole runs: what a user types, what comes out, going on after a stop, and what a mistake is told."""

import contextlib
import dataclasses
import io
import json
import re
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_dualpipe.data import BYTES
from moe_dualpipe.inference.sampling import Sampling
from moe_dualpipe.models import build_model, expert_loads
from moe_dualpipe.planner.flops import train_flops_per_token
from moe_dualpipe.profiler import analyze, read_trace
from moe_dualpipe.runtime.groups import init_world
from moe_dualpipe.runtime.launch import Launch
from moe_dualpipe.schedule import build
from moe_dualpipe.training import trainer as trainer_module
from moe_dualpipe.training.checks import option_values
from moe_dualpipe.training.command_line import parse_arguments
from moe_dualpipe.training.config import TrainConfig
from moe_dualpipe.training.loop import TrainingRun, main
from moe_dualpipe.training.trainer import Trainer
from tests.support.ranks import run_ranks
from tests.support.runs import (
    MODEL,
    ROOT,
    SMALL,
    change,
    command,
    introduction,
    losses,
    make_plan,
    make_trainer,
    options,
    records,
    resolve,
    save,
    settings,
    train,
    train_each,
)


@pytest.mark.parametrize("ranks,changes", [(1, {}), (2, {}), (2, {"ep": 2}), (2, {"schedule": "1f1b"})], ids=str)
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(tmp_path, ranks, changes):
    whole = run_ranks(ranks, train, settings(tmp_path / "whole", save_every=3, **changes))[0]
    assert list(losses(whole)) == [1, 2, 3, 4, 5, 6]
    saved = sorted(path.name for path in (tmp_path / "whole" / "checkpoints").iterdir())
    assert saved == ["step-000003", "step-000006"]
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-000003"
    rest = run_ranks(ranks, train, settings(tmp_path / "rest", resume=str(checkpoint), **changes))[0]
    assert losses(rest) == {step: loss for step, loss in losses(whole).items() if step > 3}
    assert losses(rest, "grad_norm") == {s: norm for s, norm in losses(whole, "grad_norm").items() if s > 3}
    assert losses(rest, "validation_loss")[6] == losses(whole, "validation_loss")[6]


def test_the_division_of_the_work_does_not_change_the_run(tmp_path):
    """Pipelines of any size and schedule train alike; a run saved under one goes on under another."""
    divisions = {
        "one": (1, {}),
        "dualpipe": (2, {"save_every": 3}),
        "chimera": (2, {"schedule": "chimera"}),
        "interleaved_1f1b": (2, {"schedule": "interleaved_1f1b", "num_chunks": 2}),
        "dualpipev": (2, {"schedule": "dualpipev"}),
    }
    runs = {k: run_ranks(n, train, settings(tmp_path / k, **changes))[0] for k, (n, changes) in divisions.items()}
    reference = losses(runs["one"])
    for name in divisions:
        assert losses(runs[name]) == pytest.approx(reference, rel=1e-5), name
    checkpoint = str(tmp_path / "dualpipe" / "checkpoints" / "step-000003")
    moved = run_ranks(1, train, settings(tmp_path / "moved", resume=checkpoint))[0]
    assert losses(moved) == pytest.approx({s: loss for s, loss in reference.items() if s > 3}, rel=1e-5)


def said(rank, config):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        train(rank, config)
    return out.getvalue()


def test_a_run_resumed_from_the_middle_is_resumed_itself(tmp_path):
    """Not the later checkpoint that its folder still has, of the run before."""
    config = settings(tmp_path / "run", seq_len=16, steps=3, save_every=1)
    assert f" --resume {config.checkpoint.out} --steps 6\n" in run_ranks(1, said, config)[0]
    first, second = (str(tmp_path / "run" / "checkpoints" / f"step-00000{step}") for step in (1, 2))
    assert f" --resume {second} --steps 4\n" in run_ranks(1, said, change(config, steps=2, resume=first))[0]


CHOICES = [
    {"overlap": False},
    {"recompute": "norms"},
    {"recompute": "attention"},
    {"recompute": "full"},
    {"max_deferred": 1},
]


@pytest.mark.parametrize("ranks,division", [(1, {}), (2, {"pp": 2}), (2, {"pp": 1, "ep": 2})])
def test_overlap_and_recompute_change_no_bit_of_a_run(tmp_path, ranks, division):
    small = {"steps": 2, "seq_len": 16, "eval_sequences": 1, **division}
    configs = [settings(tmp_path / str(i), **small, **choice) for i, choice in enumerate([{}, *CHOICES])]
    clocks = ("seconds", "tokens_per_s", "peak_memory_mb")
    runs = [
        [{key: value for key, value in record.items() if key not in clocks} for record in run]
        for run in run_ranks(ranks, train_each, configs)[0]
    ]
    assert len(runs[0]) == 4
    for run, choice in zip(runs[1:], CHOICES, strict=True):
        assert run == runs[0], choice


@pytest.mark.parametrize("ranks,changes", [(1, {}), (2, {"pp": 1, "ep": 2})], ids=str)
def test_a_fused_loss_trains_alike_and_its_checkpoints_are_the_same(tmp_path, ranks, changes):
    """Losses to fp32 rounding that has gone through the optimizer's steps; the checkpoint goes on without it."""
    model = dataclasses.replace(MODEL, vocab_size=1009)
    plain = settings(tmp_path / "plain", model=model, **changes)
    fused = settings(tmp_path / "fused", model=model, save_every=3, fused_loss=True, **changes)
    expected, seen = run_ranks(ranks, train_each, [plain, fused])[0]
    assert losses(seen) == pytest.approx(losses(expected), rel=1e-5)
    assert losses(seen, "grad_norm") == pytest.approx(losses(expected, "grad_norm"), rel=1e-4)
    assert losses(seen, "validation_loss") == pytest.approx(losses(expected, "validation_loss"), rel=1e-5)
    half = str(tmp_path / "fused" / "checkpoints" / "step-000003")
    rest = run_ranks(ranks, train, change(plain, out=str(tmp_path / "rest"), resume=half))[0]
    assert losses(rest) == pytest.approx({s: loss for s, loss in losses(seen).items() if s > 3}, rel=1e-5)


@pytest.mark.parametrize("ranks,changes", [(1, {}), (2, {"schedule": "1f1b"}), (2, {"pp": 1, "ep": 2})])
def test_a_profile_changes_no_bit_and_says_where_the_time_went(tmp_path, ranks, changes):
    small = {"steps": 4, "seq_len": 16, "eval_sequences": 1, **changes}
    plain, profiled = (
        settings(tmp_path / name, profile=steps, **small) for name, steps in (("plain", 0), ("profiled", 2))
    )
    runs = run_ranks(ranks, train_each, [plain, profiled])[0]
    assert losses(runs[1]) == losses(runs[0])
    assert not (tmp_path / "plain" / "profile").exists()
    folder = tmp_path / "profiled" / "profile"
    recordings = {f"rank{rank}.json.gz" for rank in range(ranks)}
    assert {path.name for path in folder.iterdir()} == {*recordings, "report.json", "steps.png"}
    report = json.loads((folder / "report.json").read_text())
    pp, dp = changes.get("pp", ranks), 2 if "ep" in changes else 1
    assert len(report["pipelines"]) == dp
    assert [one["rank"] for one in report["overlap"]] == list(range(ranks))
    for pipeline in report["pipelines"]:
        assert pipeline["step"] in (3, 4)
        assert len(pipeline["ranks_ms"]) == pp
        for account in pipeline["ranks_ms"]:
            assert account["forward"] > 0 and account["backward"] > 0 and account["optimizer"] > 0
            assert account["rest"] >= 0
        assert pipeline["makespan_ms"] <= pipeline["ranks_ms"][0]["step"]
    for rank in range(ranks):
        (analysis,) = analyze(read_trace(folder / f"rank{rank}.json.gz"))
        assert {"attn(F)", "mlp(F)", "attn(B)", "optimizer"} <= {phase.name for phase in analysis.phases}
    # 3 layers with experts, forward and backward of 4 micro-batches in 2 steps: 4 transfers each, and the counts.
    transfers = 3 * 4 * 2 * (4 + 1) if "ep" in changes else 0
    assert [one["num_comm"] for one in report["overlap"]] == [transfers] * ranks


def test_a_profile_that_does_not_fit_is_told_before_the_run(tmp_path):
    with pytest.raises(ValueError, match="--profile 5 needs 7 steps, including 2 to warm up, but the run has 6"):
        make_plan(settings(tmp_path / "run", profile=5))
    make_plan(settings(tmp_path / "run", profile=4))
    with pytest.raises(ValueError, match="--profile must be finite and not negative: got -1"):
        resolve(["--profile", "-1"])


def test_flags_of_the_overlap():
    assert parse_arguments([]).parallel.overlap
    assert not parse_arguments(["--no-overlap"]).parallel.overlap
    assert parse_arguments(["--recompute", "norms"]).compute.recompute == "norms"
    assert parse_arguments(["--max-deferred", "2"]).parallel.max_deferred == 2
    assert parse_arguments(["--fused-loss"]).compute.fused_loss
    assert not parse_arguments([]).compute.fused_loss
    with pytest.raises(ValueError, match="--max-deferred must be at least 1: got -1"):
        resolve(["--max-deferred", "-1"])


def test_experts_move_between_ranks_through_a_checkpoint(tmp_path):
    spread = settings(tmp_path / "ep2", ep=2, save_every=3)
    run_ranks(2, train, spread)
    checkpoint = str(tmp_path / "ep2" / "checkpoints" / "step-000003")
    # Two data-parallel ranks in both cases, so the batches are the same; only the experts' places differ.
    together = run_ranks(2, train, settings(tmp_path / "ep1", pp=1, ep=1, resume=checkpoint))[0]
    expected = {step: loss for step, loss in losses(records(spread.checkpoint.out)).items() if step > 3}
    assert losses(together) == pytest.approx(expected, rel=1e-5)


def test_training_learns_and_reports(tmp_path):
    config = settings(tmp_path / "run", steps=40, peak_tflops=0.001)
    run = run_ranks(1, train, config)[0]
    before, after = losses(run, "validation_loss").values()
    assert after < before - 1.5
    record = run[20]
    assert {"step", "loss", "grad_norm", "lr", "tokens_per_s", "expert_load_max_over_mean"} <= set(record)
    assert record["tokens"] == 4 * 32
    flops = train_flops_per_token(MODEL, 32) * record["tokens_per_s"]
    assert record["mfu"] == pytest.approx(flops / 1e9, abs=1e-4)
    assert 1 <= record["expert_load_max_over_mean"] <= MODEL.num_experts / MODEL.experts_per_token
    assert 0 <= record["dead_experts"] < 1


def fused_stages(rank, config):
    return [stage.options.fused_loss for stage in make_trainer(rank, config).stages.values()]


@pytest.mark.parametrize("fused_loss", [False, True])
def test_the_choice_of_the_loss_reaches_the_stages(tmp_path, fused_loss):
    config = settings(tmp_path, fused_loss=fused_loss)
    assert run_ranks(1, fused_stages, config) == [[fused_loss] * 2]


def drifting_run(rank, config, when):
    trainer = make_trainer(rank, config)
    train_step = trainer.train_step

    def drift(step):
        record = train_step(step)
        if step == when and rank:
            with torch.no_grad():
                next(iter(trainer.optimizer.parameters.values())).view(-1)[0] += 1
        return record

    trainer.train_step = drift  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="must stay bit-equal"):
        TrainingRun(trainer).run()
    return len(losses(records(config.checkpoint.out)))


@pytest.mark.parametrize("every,when,recorded", [(None, 5, 6), (3, 1, 3)])
def test_replicas_that_drift_stop_the_run_at_the_next_check(tmp_path, every, when, recorded):
    # With divided state, the next step would send the owner's weights to all: replicas cannot differ for long.
    config = settings(tmp_path, pp=1, check_replicas_every=every, zero=False)
    assert run_ranks(2, drifting_run, config, when)[0] == recorded


def save_twice(rank, config):
    trainer = make_trainer(rank, config)
    first = save(trainer, 3)
    trainer.train_step(0)
    assert save(trainer, 3) == first
    return [path.name for path in first.parent.iterdir()]


def test_a_step_can_be_saved_again(tmp_path):
    assert run_ranks(1, save_twice, settings(tmp_path)) == [["step-000003"]]


def bf16_step(rank, config):
    trainer = make_trainer(rank, config)
    trainer.train_step(0)
    assert {p.dtype for p in trainer.optimizer.parameters.values()} == {torch.bfloat16}
    assert {w.dtype for w in trainer.optimizer.master.values()} == {torch.float32}


def test_bf16_trains_with_fp32_master_weights(tmp_path):
    run_ranks(1, bf16_step, settings(tmp_path, dtype="bfloat16"))


@pytest.mark.parametrize("changes", [{}, {"ep": 2}, {"pp": 1}], ids=str)
def test_parameters_are_counted_once(tmp_path, changes):
    sizes = {name: p.numel() for name, p in build_model(MODEL).named_parameters()}
    total = sum(sizes.values())
    idle = sum(size for name, size in sizes.items() if ".experts." in name) / 2  # two of four experts a token
    printed, nothing = run_ranks(2, introduction, settings(tmp_path, **changes))
    assert f"{total / 1e6:.2f} M parameters, {(total - idle) / 1e6:.2f} M active" in printed
    assert nothing == ""


def loads_by_layer(rank, config):
    trainer = make_trainer(rank, config)
    batch = trainer.plan.text.batch(0, 0, 0, 4, config.batch.seq_len)
    trainer.pipeline_step(*batch)
    model = build_model(MODEL)
    model(batch[0])
    assert torch.equal(trainer.balance.loads(trainer.device), expert_loads(model))


@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipev"])
def test_the_load_of_every_layer_is_its_own(tmp_path, schedule):
    run_ranks(2, loads_by_layer, settings(tmp_path, schedule=schedule))


def test_the_sample_follows_the_seed_and_the_timeout_reaches_torch(tmp_path, monkeypatch):
    asked = []
    trainer: Any = object.__new__(Trainer)
    trainer.config, trainer.dtype = settings(tmp_path, seed=5), torch.float32
    trainer.executor = trainer.groups = trainer.schedule = SimpleNamespace(placement=None, pipeline=None)
    trainer.plan = SimpleNamespace(text=SimpleNamespace(tokenizer=BYTES))
    monkeypatch.setattr(trainer_module, "generate", lambda *how: asked.extend(how[-2:]) or torch.tensor([[72, 105]]))
    assert trainer.sample() == "Hi"
    assert asked.pop(0) == Sampling(0.8, 0, 1.0)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, timeout, **__: asked.append(timeout))
    init_world(torch.device("cpu"), Launch(0, 0, 1, 1), 12.5)
    init_world(torch.device("cpu"), Launch(0, 0, 2, 2), 12.5)
    assert asked == [5, timedelta(seconds=12.5), timedelta(seconds=12.5)]


def test_a_finished_run_and_a_broken_checkpoint_are_not_resumed(tmp_path):
    run_ranks(1, train, settings(tmp_path, steps=1))
    with pytest.raises(ValueError, match="is at step 1 already: use --steps larger than that"):
        make_plan(settings(tmp_path, steps=1, resume=str(tmp_path)))
    (tmp_path / "checkpoints" / "step-000001" / ".metadata").write_bytes(b"")
    with pytest.raises(ValueError, match=r"step-000001: .metadata has 0 bytes, expected [\d,]+"):
        make_plan(settings(tmp_path, resume=str(tmp_path)))


# ---- From the command line ----


def test_torchrun_trains_and_tells_how_to_resume(tmp_path):
    out = tmp_path / "run"
    done = command("--steps", 3, "--out", out, *SMALL, processes=2)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"validation loss \d\.\d+ -> \d\.\d+ nats per byte", lines[-1])
    assert "dualpipe over 2 pipeline x 1 data-parallel ranks, on cpu in float32" in lines
    assert any(
        re.fullmatch(r"  stage 1 on pipeline ranks 0 and 1: layer 1 \+ head \(\d\d% of the work\)", s) for s in lines
    )
    assert f"saved {out}/checkpoints/step-000003" in lines
    assert "    | class " in done.stdout
    assert "loss" in done.stderr
    assert "tokens/s" in done.stderr
    (resume,) = [line.removeprefix("to resume: ") for line in lines if line.startswith("to resume: ")]
    assert re.match(r"\S*torchrun --nproc-per-node 2 train.py ", resume)
    again = command(*resume.split("train.py ")[1].split(), processes=2)
    assert again.returncode == 0, again.stderr
    assert f"resumed from {out}/checkpoints/step-000003, steps 4 to 6" in again.stdout
    assert list(losses(records(out))) == [1, 2, 3, 4, 5, 6]


def test_a_single_process_trains_with_your_own_experts_and_a_fused_loss(tmp_path):
    own = "examples.custom_experts:SquaredReLUExperts"
    done = command("--steps", 2, "--out", tmp_path, *SMALL, "--model.experts", own, "--fused-loss")
    assert done.returncode == 0, done.stderr
    assert "dualpipev over 1 pipeline x 1 data-parallel ranks" in done.stdout


def test_the_example_of_own_stages_gives_the_same_under_any_schedule_of_the_same_stages(tmp_path):
    printed = {}
    order = tmp_path / "order.csv"
    order.write_text(build("1f1b", 2, 8).to_csv())
    for name in ("dualpipe", str(order)):
        done = command(name, processes=2, script="examples/own_stages.py")
        assert done.returncode == 0, done.stderr
        printed[name] = set(
            re.findall(r"stage \d has a gradient of norm \d\.\d{4}|micro-batch \d has a loss of \d\.\d{4}", done.stdout)
        )
    assert len(printed[str(order)]) == 2 + 8
    assert printed["dualpipe"] == printed[str(order)]


# ---- Mistakes ----


@pytest.mark.parametrize("world_size,arguments,message", [
    (2, ["--micro-batches", "5"],
     "dualpipe needs an even number of micro-batches >= 2 x ranks: got 5 for 2 ranks; use 6"),
    (2, ["--micro-batches", "2"],
     "dualpipe needs an even number of micro-batches >= 2 x ranks: got 2 for 2 ranks; use 4"),
    (3, ["--schedule", "dualpipe"], "dualpipe needs an even number of pipeline ranks: got 3; use 4, or dualpipev"),
    (8, [], "4 layers cannot be divided over 8 pipeline stages: use at least 8 layers, fewer pipeline ranks, or"),
    (4, ["--ep", "4", "--model.num-experts", "6"],
     "--ep 4 does not divide the 6 experts: use --ep 1 or 2 or 3 or 6"),
    (4, ["--pp", "2", "--ep", "4"],
     "--ep 4 does not divide the 2 data-parallel ranks (4 processes / 2 pipeline ranks): use --ep 1 or 2"),
    (3, ["--ep", "2"], "--ep 2 does not divide the 3 processes: start a multiple of 2 processes"),
    (4, ["--pp", "3"],
     "4 processes cannot be divided into pipelines of 3 ranks: use --pp 1, 2, 4, or start a multiple of 3 processes"),
    (1, ["--data", "/nowhere"], "--data /nowhere: no such file or folder"),
    (1, ["--data", "/dev/null"], "--data /dev/null: no such file or folder"),
    (1, ["--data", "LICENSE", "--seq-len", "4096"], "too little text in --data LICENSE"),
    (1, ["--device", "cuda"], "--device cuda: torch finds no GPU on this machine; use --device cpu"),
    (1, ["--device", "tpu"], "--device must be cpu, cuda or auto: got 'tpu'"),
    (1, ["--dtype", "int8"], "--dtype must be float32, bfloat16 or auto: got 'int8'"),
    (1, ["--preset", "tinny"], "unknown preset 'tinny'; did you mean 'tiny'?"),
    (1, ["--schedule", "dualpip"], "unknown schedule 'dualpip'; did you mean 'dualpipe'?"),
    (1, ["--resume", "/nowhere"], "no checkpoint in /nowhere: give the folder of a run or of a checkpoint"),
    (1, ["--data", ""], "--data is empty: name a file, a folder, a glob"),
    (1, ["--out", "LICENSE"], "cannot write to --out LICENSE: File exists"),
    (1, ["--out", "LICENSE/below"], "cannot write to --out LICENSE/below: Not a directory"),
    (1, ["--optim.lr", "-1"], "--optim.lr must be positive and finite: got -1.0"),
    (1, ["--optim.warmup-steps", "-1"], "--optim.warmup-steps must be finite and not negative: got -1"),
    (1, ["--optim.clip", "nan"], "--optim.clip must be positive and finite: got nan"),
    (1, ["--optim.beta2", "1"], "--optim.beta2 must be at least 0 and below 1: got 1.0"),
    (1, ["--model.experts", "json:loads"], "the expert layer 'json:loads' must be an nn.Module class"),
    (1, ["--ep", "3"], "--ep 3 does not divide the 8 experts: use --ep 1 or 2 or 4 or 8"),
    (1, ["--steps", "0"], "--steps must be at least 1: got 0"),
    (1, ["--timeout", "0"], "--timeout must be positive and finite: got 0.0"),
    (1, ["--model.vocab-size", "64"], "--data (bytes) needs --model.vocab-size 256: got 64"),
    (1, ["--model.experts", "nowhere:Experts"], "cannot import the expert layer 'nowhere:Experts'"),
])  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(monkeypatch, capsys, world_size, arguments, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith(f"train.py: error: {message}")


def test_a_new_run_never_mixes_with_an_old_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert resolve(options(device="cpu")).folder == Path("runs/tiny")
    (tmp_path / "runs" / "tiny" / "checkpoints").mkdir(parents=True)
    assert resolve(options(device="cpu")).folder == Path("runs/tiny-2")
    assert resolve(options(device="cpu", out="runs/tiny")).folder == Path("runs/tiny")  # it was killed too early
    (tmp_path / "runs" / "tiny" / "checkpoints" / "step-000002").mkdir()
    resumed = options(device="cpu", resume="runs/tiny/checkpoints/step-000002", out="runs/tiny")
    assert resolve(resumed).folder == Path("runs/tiny")
    with pytest.raises(ValueError, match="--out runs/tiny already holds a run"):
        resolve(change(resumed, resume="runs/other"))
    with pytest.raises(SystemExit) as exit_:
        main(["--out", "runs/tiny"])
    assert exit_.value.code == 2
    assert capsys.readouterr().err == (
        "train.py: error: --out runs/tiny already holds a run: continue it with --resume runs/tiny, "
        "or use another --out\n"
    )


class UnstackedExperts(torch.nn.Module):
    """Somebody's own experts, one linear layer each."""

    def __init__(self, config, num_local_experts):
        super().__init__()
        width = config.hidden_size
        self.each = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(num_local_experts))

    def forward(self, x_MD, expert_offsets):
        pieces = x_MD.split(expert_offsets.diff().tolist())
        return torch.cat([expert(piece) for expert, piece in zip(self.each, pieces, strict=True)])


def resumed_where_it_does_not_fit(rank, config):
    with pytest.raises(ValueError, match=r"has no .*experts.*can change their number of ranks only if"):
        make_trainer(rank, config)


def test_your_own_unstacked_experts_resume_where_they_were_and_are_refused_elsewhere(tmp_path):
    model = dataclasses.replace(MODEL, experts="tests.training.test_run:UnstackedExperts")
    run_ranks(2, train, settings(tmp_path / "a", model=model, pp=1, ep=2, save_every=3))
    checkpoint = str(tmp_path / "a" / "checkpoints" / "step-000003")
    again = run_ranks(2, train, settings(tmp_path / "b", model=model, pp=1, ep=2, resume=checkpoint))[0]
    assert losses(again) == {s: loss for s, loss in losses(records(tmp_path / "a")).items() if s > 3}
    run_ranks(1, resumed_where_it_does_not_fit, settings(tmp_path / "c", model=model, resume=checkpoint))


def test_a_checkpoint_that_lost_a_file_is_refused(tmp_path):
    run_ranks(1, train, settings(tmp_path / "a", steps=1))
    checkpoint = tmp_path / "a" / "checkpoints" / "step-000001"
    for path in checkpoint.glob("*.distcp"):
        path.unlink()
    with pytest.raises(ValueError, match=r"step-000001 is broken: __0_0.distcp is missing"):
        make_plan(settings(tmp_path / "b", resume=str(checkpoint)))


def test_a_record_that_is_none_is_told_before_the_ranks_meet(tmp_path):
    run_ranks(1, train, settings(tmp_path, steps=1))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("oops\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 4: not a record with a step: 'oops'"):
        make_plan(settings(tmp_path, resume=str(tmp_path)))


def test_metrics_of_repeated_steps_are_dropped(tmp_path):
    config = settings(tmp_path / "a", steps=4, save_every=2)
    run_ranks(1, train, config)
    checkpoint = str(tmp_path / "a" / "checkpoints" / "step-000002")
    before = records(config.checkpoint.out)
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # as a process that was killed leaves it
    after = run_ranks(1, train, change(config, resume=checkpoint))[0]
    assert [record["step"] for record in after if "loss" in record] == [1, 2, 3, 4]
    assert losses(after) == losses(before)


def test_a_model_that_contradicts_itself_is_exit_code_2(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--device", "cpu", "--model.head-dim", "7"])
    assert exit_.value.code == 2
    assert "head_dim must be even: got 7" in capsys.readouterr().err


def test_other_ranks_say_nothing(monkeypatch, capsys):
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    for arguments in (["--micro-batches", "3"], ["--no-such-option"]):
        with pytest.raises(SystemExit) as exit_:
            main(["--device", "cpu", *arguments])
        assert exit_.value.code == 2
        assert capsys.readouterr() == ("", "")


def test_a_mistake_under_torchrun_is_no_hang():
    done = command("--micro-batches", 3, processes=2)
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("train.py: error:")]
    assert errors == [
        "train.py: error: dualpipe needs an even number of micro-batches >= 2 x ranks: got 3 for 2 ranks; use 4"
    ]
    assert "exitcode  : 2" in done.stderr


def test_help_names_every_choice():
    done = command("--help")
    assert done.returncode == 0
    for flag in option_values(TrainConfig()):
        assert f"--{flag}" in done.stdout
    assert "Folder for checkpoints and metrics" in done.stdout
