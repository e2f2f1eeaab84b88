"""The parts of a training run, each alone: data, optimizer, checkpoint names, configuration, metrics."""

import dataclasses
import itertools
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn

from moe_dualpipe.models import ModelConfig
from moe_dualpipe.schedule import Placement
from moe_dualpipe.training import checkpoint, data
from moe_dualpipe.training.config import Launch, OptimizerConfig, TrainConfig, parse, resume_command
from moe_dualpipe.training.manifest import FileSum, Manifest
from moe_dualpipe.training.optimizer import Optimizer, learning_rate
from moe_dualpipe.training.parallel import Layout, build_groups
from moe_dualpipe.training.resolve import resolve

# ---- Data ----


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text(f"<{i:02}>" * 20)
    (tmp_path / "image.bin").write_bytes(b"\x00\x01\x02" * 50)
    (tmp_path / ".hidden").write_text("secret" * 50)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "deep.txt").write_text("<deep>" * 20)
    return tmp_path


def test_batches_are_a_pure_function_of_seed_step_and_rank(folder):
    text = data.load(str(folder), 16)
    x, y = text.batch(seed=1, step=7, rank=2, count=5, seq_len=16)
    assert x.shape == y.shape == (5, 16)
    assert torch.equal(x[:, 1:], y[:, :-1])
    again = data.load(str(folder), 16)
    again.batch(seed=1, step=3, rank=0, count=9, seq_len=16)  # what was asked before does not matter
    assert torch.equal(x, again.batch(seed=1, step=7, rank=2, count=5, seq_len=16)[0])
    others = [text.batch(*key, count=5, seq_len=16)[0] for key in [(2, 7, 2), (1, 8, 2), (1, 7, 3)]]
    assert not any(torch.equal(x, other) for other in others)


def test_steps_and_ranks_never_share_a_batch_and_windows_stay_inside():
    long = data.TextData(np.arange(256).astype(np.uint8).repeat(20), np.zeros(9, dtype=np.uint8), "")
    batches = [long.batch(0, step, rank, 4, 8)[0] for step in range(4) for rank in range(4)]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(batches, 2))
    short = data.TextData(np.arange(10).astype(np.uint8), np.zeros(9, dtype=np.uint8), "")
    x, y = short.batch(0, 0, 0, 500, 8)
    assert (x.min(), y.max()) == (0, 9)


def test_held_out_files_are_never_trained_on(folder):
    text = data.load(str(folder), 16)
    train, held_out = (bytes(stream).decode() for stream in (text.train, text.held_out))
    names = [f"<{i:02}>" for i in range(40)] + ["<deep>"]
    assert all((name in train) != (name in held_out) for name in names)
    assert sum(name in held_out for name in names) == 2
    assert "secret" not in train + held_out
    assert "\x01" not in train + held_out
    assert len(train) + len(held_out) == 40 * (80 + 1) + 120 + 1


def test_held_out_batches_cover_the_held_out_text_evenly(folder):
    text = data.load(str(folder), 16)
    whole = text.held_out_batch(0, 6, 6, 16)[0]
    parts = [text.held_out_batch(first, 2, 6, 16)[0] for first in (0, 2, 4)]
    assert torch.equal(whole, torch.cat(parts))
    assert whole[0].tolist() == text.held_out[:16].tolist()
    assert text.held_out_batch(0, 6, 6, 16)[1][-1].tolist() == text.held_out[-16:].tolist()


def test_one_file_or_a_glob_will_do(folder):
    single = data.load(str(folder / "07.txt"), 8)
    assert bytes(single.train) + bytes(single.held_out) == b"<07>" * 20 + b"\0"
    assert "".join(sorted(set(bytes(data.load(f"{folder}/1*.txt", 8).train).decode()))) == "\0" + "0123456789<>"


def test_the_standard_library_is_there():
    text = data.load("stdlib", 256)
    assert len(text.train) > 5_000_000
    assert len(text.held_out) > 100_000


@pytest.mark.parametrize("make,seq_len,problem", [
    (lambda p: p / "missing", 8, "no such file or folder, and no file matches"),
    (lambda p: f"{p}/*.nothing", 8, "no such file or folder, and no file matches"),
    (lambda p: p, 8, "no text in --data .*: 1 files, all empty or not text"),
    (lambda p: p / "short", 8, r"too little text in --data .*: 3 bytes to train on and 2 held out, but one sequence "
                               r"takes 9; use more text or --seq-len 1"),
])  # fmt: skip
def test_data_that_cannot_be_used(tmp_path, make, seq_len, problem):
    path = make(tmp_path)
    (tmp_path / "empty").touch()
    if problem.startswith("too"):
        (tmp_path / "short").write_text("abcd")
    with pytest.raises(ValueError, match=problem):
        data.load(str(path), seq_len)


def test_bytes_round_trip():
    assert data.decode(data.encode("grün → ok")) == "grün → ok"
    assert data.decode([0xFF, 65]) == "\ufffdA"


# ---- Optimizer ----

OPTIM = OptimizerConfig(lr=0.1, warmup_steps=4, final_lr=0.2, weight_decay=0.5)


def test_learning_rate_warms_up_and_ends_where_it_says():
    rates = [learning_rate(OPTIM, step, 14) for step in range(14)]
    assert rates[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert rates[4] == pytest.approx(0.1)
    assert rates[-1] == pytest.approx(0.02)
    assert rates[9] == pytest.approx(0.1 * (0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 5 / 9))))
    assert all(a >= b for a, b in itertools.pairwise(rates[3:]))
    assert learning_rate(OPTIM, 0, 1) == pytest.approx(0.025)


def make_pair(dtype):
    parameters = {"matrix": nn.Parameter(torch.randn(3, 2, dtype=dtype)), "norm": nn.Parameter(torch.ones(2).to(dtype))}
    return parameters, Optimizer(parameters, OPTIM)


def test_fp32_steps_are_adamws_with_decay_on_matrices_only():
    parameters, optimizer = make_pair(torch.float32)
    copies = {name: nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
    adamw = torch.optim.AdamW(
        [{"params": [copies["matrix"]], "weight_decay": 0.5}, {"params": [copies["norm"]], "weight_decay": 0.0}],
        betas=(OPTIM.beta1, OPTIM.beta2),
    )
    for step in range(3):
        for name, p in parameters.items():
            p.grad = torch.randn_like(p)
            copies[name].grad = p.grad * 0.25
        for group in adamw.param_groups:
            group["lr"] = 0.1 / (step + 1)
        adamw.step()
        optimizer.step(0.1 / (step + 1), grad_scale=0.25)
        assert all(p.grad is None for p in parameters.values())
    for name, p in parameters.items():
        torch.testing.assert_close(p, copies[name], rtol=0, atol=0)
    assert optimizer.master["matrix"] is parameters["matrix"]


def test_bf16_weights_keep_small_updates_in_their_fp32_master():
    parameters, optimizer = make_pair(torch.bfloat16)
    norm, master = parameters["norm"], optimizer.master["norm"]
    assert master.dtype == torch.float32
    for _ in range(20):
        for p in parameters.values():
            p.grad = torch.ones(p.shape)
            assert p.grad_dtype == torch.float32
        optimizer.step(2**-12, grad_scale=1.0)  # Adam moves by about the learning rate, far below bf16's step at 1
    assert master[0].item() == pytest.approx(1 - 20 * 2**-12, abs=1e-4)
    assert torch.equal(norm, master.bfloat16())
    assert norm[0].item() < 1


def test_stacked_experts_decay_and_the_moments_follow_the_betas():
    parameters = {"experts": nn.Parameter(torch.ones(2, 2, 2))}
    optimizer = Optimizer(parameters, OptimizerConfig(weight_decay=0.5, beta1=0.5))
    parameters["experts"].grad = torch.zeros(2, 2, 2)
    optimizer.step(0.1, 1.0)
    assert parameters["experts"][0, 0, 0].item() == pytest.approx(0.95)
    parameters["experts"].grad = torch.ones(2, 2, 2)
    optimizer.step(0.1, 1.0)
    assert optimizer.tensors()["exp_avg"]["experts"][0, 0, 0].item() == 0.5


def test_loading_rounds_the_master_weights_into_a_bf16_model():
    parameters, optimizer = make_pair(torch.bfloat16)
    optimizer.tensors()["model"]["matrix"].fill_(3.0)
    optimizer.loaded(7)
    assert (parameters["matrix"] == 3).all()
    assert optimizer.adamw.state[optimizer.master["matrix"]]["step"] == 7


# ---- Checkpoint names ----


def test_experts_are_saved_one_by_one_under_their_global_number():
    stacked = torch.arange(6.0).view(3, 2)
    named = dict(checkpoint.global_tensors("layers.1.mlp.experts.up", stacked, range(3, 6)))
    assert {name: t.tolist() for name, t in named.items()} == {
        "layers.1.mlp.experts.up.3": [0, 1], "layers.1.mlp.experts.up.4": [2, 3], "layers.1.mlp.experts.up.5": [4, 5],
    }  # fmt: skip
    named["layers.1.mlp.experts.up.4"].fill_(9)
    assert stacked[1].tolist() == [9, 9]  # views: loading into them loads the parameter
    assert [*dict(checkpoint.global_tensors("head.weight", stacked, range(3)))] == ["head.weight"]
    own = dict(checkpoint.global_tensors("layers.1.mlp.experts.mix.weight", stacked, range(4, 8)))
    assert [*own] == ["layers.1.mlp.experts.mix.weight.4-7"]


def write_manifest(folder, step=3, model=None):
    """A checkpoint of no tensors at all."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tensors.json").write_bytes(b"{}")
    files = {"tensors.json": FileSum.of(b"{}")}
    (folder / "run.json").write_bytes(Manifest(step, model or {}, files).encode())


def test_find_takes_the_newest_complete_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"nothing to resume from: no checkpoint in .*; start without --resume"):
        checkpoint.find(str(tmp_path))
    for step, complete in [(9, True), (20, True), (100, False), (200, None)]:
        folder = tmp_path / "checkpoints" / f"step-{step:06d}"
        write_manifest(folder)
        if complete is None:
            (folder / "tensors.json").unlink()
        elif not complete:
            (folder / "run.json").unlink()
    assert checkpoint.find(str(tmp_path)).name == "step-000020"
    assert checkpoint.find(str(tmp_path / "checkpoints")).name == "step-000020"
    direct = tmp_path / "checkpoints" / "step-000009"
    assert checkpoint.find(str(direct)) == direct


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    write_manifest(tmp_path, model={"hidden_size": 64})
    with pytest.raises(ValueError, match=r"holds another model: hidden_size is 64 there and 128 here$"):
        checkpoint.check_model(tmp_path, ModelConfig())
    write_manifest(tmp_path, model={**dataclasses.asdict(ModelConfig()), "depth": 3})
    with pytest.raises(ValueError, match=r"holds another model: depth is 3 there and 'unknown' here$"):
        checkpoint.check_model(tmp_path, ModelConfig())
    (tmp_path / "run.json").write_text("not json")
    with pytest.raises(ValueError, match="cannot read"):
        checkpoint.check_model(tmp_path, ModelConfig())


def test_a_choice_that_is_younger_than_the_checkpoint_counts_as_its_default(tmp_path):
    older = dataclasses.asdict(ModelConfig())
    del older["rope_theta"]
    write_manifest(tmp_path, step=7, model=older)
    assert checkpoint.check_model(tmp_path, ModelConfig()) == 7
    with pytest.raises(ValueError, match=r"holds another model: rope_theta is 10000.0 there and 500.0 here$"):
        checkpoint.check_model(tmp_path, ModelConfig(rope_theta=500.0))


def test_how_to_train_is_not_what_the_model_is(tmp_path):
    model = {**dataclasses.asdict(ModelConfig()), "init_std": 0.5, "sequence_loss": 1e-4, "z_loss": 0, "mtp_weight": 1}
    write_manifest(tmp_path, step=7, model=model)
    assert checkpoint.check_model(tmp_path, ModelConfig()) == 7


# ---- Layout ----


def test_layout_puts_expert_peers_next_to_each_other():
    layouts = [Layout(pp=2, dp=4, ep=2, rank=r) for r in range(8)]
    assert [(x.pp_rank, x.dp_rank) for x in layouts] == [(p, d) for p in range(2) for d in range(4)]
    assert all(x.world_rank(x.pp_rank, x.dp_rank) == x.rank for x in layouts)


def membership(rank):
    groups = build_groups(Layout(pp=1, dp=4, ep=2, rank=rank), Placement.straight(1))
    members = torch.distributed.get_process_group_ranks
    return members(groups.experts), members(groups.expert_replicas), members(groups.dense)


def test_neighbours_exchange_tokens_and_equal_experts_are_replicas():
    everybody = [0, 1, 2, 3]
    assert run_ranks(4, membership) == [
        ([0, 1], [0, 2], everybody), ([0, 1], [1, 3], everybody),
        ([2, 3], [0, 2], everybody), ([2, 3], [1, 3], everybody),
    ]  # fmt: skip


# ---- Configuration ----


def launch(processes):
    return Launch(0, 0, processes, processes)


def test_the_device_is_the_gpus_if_there_is_one_for_each_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for processes, device, dtype in [(1, "cuda", "bfloat16"), (2, "cuda", "bfloat16"), (4, "cpu", "float32")]:
        config = resolve(TrainConfig(), launch(processes))
        assert (config.device, config.dtype) == (device, dtype)
    with pytest.raises(ValueError, match="4 processes and 2 GPUs here: start at most 2 processes, or use --device cpu"):
        resolve(TrainConfig(device="cuda"), launch(4))


def test_defaults_follow_from_the_number_of_processes():
    one = resolve(parse(["--device", "cpu"]), launch(1))
    assert (one.pp, one.schedule, one.micro_batches, one.device, one.dtype) == (1, "dualpipev", 8, "cpu", "float32")
    four = resolve(parse(["--ep", "2"]), launch(4))
    assert (four.pp, four.schedule, four.micro_batches) == (2, "dualpipe", 8)
    assert resolve(parse([]), launch(6)).micro_batches == 12
    assert resolve(parse(["--pp", "3"]), launch(3)).schedule == "dualpipev"
    assert resolve(parse(["--pp", "3", "--schedule", "interleaved_1f1b"]), launch(3)).micro_batches == 9
    with pytest.raises(ValueError, match="dualpipe has no number of chunks to choose: got 2"):
        resolve(parse(["--num-chunks", "2"]), launch(2))
    with pytest.raises(ValueError, match="needs at least 2 chunks a rank: got 1; use 2, or 1f1b"):
        resolve(parse(["--num-chunks", "1", "--schedule", "interleaved_1f1b"]), launch(2))
    with pytest.raises(ValueError, match="--num-chunks cannot be negative: got -1"):
        resolve(parse(["--num-chunks", "-1"]), launch(2))


def test_a_resumed_run_goes_on_in_its_own_folder():
    inner = "runs/mine/checkpoints"
    outs = {"runs/mine": "runs/mine", inner: "runs/mine", f"{inner}/step-000004": "runs/mine"}
    assert {resume: resolve(TrainConfig(resume=resume), launch(1)).out for resume in outs} == outs
    assert resolve(TrainConfig(resume="runs/mine", out="x"), launch(1)).out == "x"


def test_the_resume_command_repeats_what_was_asked(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    arguments = ["--steps", "5", "--model.num-layers=6", "--resume=old", "--prompt", "a b"]
    expected = "python train.py --model.num-layers=6 --prompt 'a b' --resume runs/x --steps 10"
    assert resume_command(arguments, "runs/x", 10) == expected
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert resume_command([], "runs/x", 10) == "torchrun --nproc-per-node 4 train.py --resume runs/x --steps 10"
    monkeypatch.setenv("PATH", "/elsewhere")  # nobody activated the environment: name the program by its path
    assert resume_command([], "runs/x", 10).split()[0] == os.path.relpath(Path(sys.executable).with_name("torchrun"))


def test_a_preset_gives_the_defaults_of_the_model():
    config = parse(["--preset", "small", "--model.num-layers", "3", "--optim.lr", "0.5"])
    assert (config.model.num_layers, config.model.hidden_size, config.optim.lr) == (3, 768, 0.5)
    assert parse(["--preset=small"]).model.hidden_size == 768
    assert parse([]) == TrainConfig()
