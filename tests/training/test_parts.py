"""The parts of a training run, each alone: checkpoint names, layout, configuration."""

import dataclasses
import os
import sys
from pathlib import Path

import pytest
import torch

from moe_dualpipe.checkpoint import check_model, find_checkpoint
from moe_dualpipe.expert_parallel.parameters import global_tensors
from moe_dualpipe.models import ModelConfig
from moe_dualpipe.runtime.groups import Layout, build_groups
from moe_dualpipe.schedule import Placement
from moe_dualpipe.training.command_line import parse_arguments, resume_command
from moe_dualpipe.training.config import TrainConfig
from tests.support.checkpoints import write_manifest
from tests.support.ranks import run_ranks
from tests.support.runs import options, resolve

# ---- Checkpoint names ----


def test_experts_are_saved_one_by_one_under_their_global_number():
    stacked = torch.arange(6.0).view(3, 2)
    named = dict(global_tensors("layers.1.mlp.experts.up", stacked, range(3, 6)))
    assert {name: t.tolist() for name, t in named.items()} == {
        "layers.1.mlp.experts.up.3": [0, 1], "layers.1.mlp.experts.up.4": [2, 3], "layers.1.mlp.experts.up.5": [4, 5],
    }  # fmt: skip
    named["layers.1.mlp.experts.up.4"].fill_(9)
    assert stacked[1].tolist() == [9, 9]  # views: loading into them loads the parameter
    assert [*dict(global_tensors("head.weight", stacked, None))] == ["head.weight"]
    own = dict(global_tensors("layers.1.mlp.experts.mix.weight", stacked, range(4, 8)))
    assert [*own] == ["layers.1.mlp.experts.mix.weight.4-7"]


def test_find_takes_the_newest_complete_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"no checkpoint in .*: give the folder of a run or of a checkpoint"):
        find_checkpoint(str(tmp_path))
    for step, complete in [(9, True), (20, True), (100, False), (200, None)]:
        folder = tmp_path / "checkpoints" / f"step-{step:06d}"
        write_manifest(folder)
        if complete is None:
            (folder / "tensors.json").unlink()
        elif not complete:
            (folder / "run.json").unlink()
    assert find_checkpoint(str(tmp_path)).name == "step-000020"
    assert find_checkpoint(str(tmp_path / "checkpoints")).name == "step-000020"
    direct = tmp_path / "checkpoints" / "step-000009"
    assert find_checkpoint(str(direct)) == direct


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    write_manifest(tmp_path, model={"hidden_size": 64})
    with pytest.raises(ValueError, match=r"holds another model: hidden_size was 64, now 128$"):
        check_model(tmp_path, ModelConfig())
    write_manifest(tmp_path, model={**dataclasses.asdict(ModelConfig()), "depth": 3})
    with pytest.raises(ValueError, match=r"holds another model: depth was 3, now 'unknown'$"):
        check_model(tmp_path, ModelConfig())
    (tmp_path / "run.json").write_text("not json")
    with pytest.raises(ValueError, match="cannot read"):
        check_model(tmp_path, ModelConfig())


def test_a_choice_that_is_younger_than_the_checkpoint_counts_as_its_default(tmp_path):
    older = dataclasses.asdict(ModelConfig())
    del older["rope_theta"]
    write_manifest(tmp_path, step=7, model=older)
    assert check_model(tmp_path, ModelConfig()) == 7
    with pytest.raises(ValueError, match=r"holds another model: rope_theta was 10000.0, now 500.0$"):
        check_model(tmp_path, ModelConfig(rope_theta=500.0))


def test_how_to_train_is_not_what_the_model_is(tmp_path):
    model = {**dataclasses.asdict(ModelConfig()), "init_std": 0.5, "sequence_loss": 1e-4, "z_loss": 0, "mtp_weight": 1}
    write_manifest(tmp_path, step=7, model=model)
    assert check_model(tmp_path, ModelConfig()) == 7


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


def test_the_device_is_the_gpus_if_there_is_one_for_each_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for processes, device, dtype in [
        (1, "cuda", torch.bfloat16),
        (2, "cuda", torch.bfloat16),
        (4, "cpu", torch.float32),
    ]:
        setup = resolve(TrainConfig(), processes)
        assert (setup.device.type, setup.dtype) == (device, dtype)
    with pytest.raises(ValueError, match="4 processes and 2 GPUs here: start at most 2 processes, or use --device cpu"):
        resolve(options(device="cuda"), 4)


def layout_and_schedule(arguments, processes):
    setup = resolve(arguments, processes)
    return setup.layout.pp, setup.schedule.name, setup.schedule.num_micro_batches


def test_defaults_follow_from_the_number_of_processes():
    one = resolve(["--device", "cpu"])
    assert (one.device.type, one.dtype, one.kernels) == ("cpu", torch.float32, "reference")
    assert layout_and_schedule(["--device", "cpu"], 1) == (1, "dualpipev", 8)
    assert layout_and_schedule(["--ep", "2"], 4) == (2, "dualpipe", 8)
    assert layout_and_schedule([], 6) == (6, "dualpipe", 12)
    assert layout_and_schedule(["--pp", "3"], 3) == (3, "dualpipev", 9)
    assert layout_and_schedule(["--pp", "3", "--schedule", "interleaved_1f1b"], 3) == (3, "interleaved_1f1b", 9)
    with pytest.raises(ValueError, match="dualpipe does not take a number of chunks: got 2"):
        resolve(["--num-chunks", "2"], 2)
    with pytest.raises(ValueError, match="needs at least 2 chunks per rank: got 1; use 2, or 1f1b"):
        resolve(["--num-chunks", "1", "--schedule", "interleaved_1f1b"], 2)
    with pytest.raises(ValueError, match="--num-chunks must be at least 1: got -1"):
        resolve(["--num-chunks", "-1"], 2)


def test_a_resumed_run_goes_on_in_its_own_folder():
    inner = "runs/mine/checkpoints"
    for resume in ("runs/mine", inner, f"{inner}/step-000004"):
        assert resolve(options(resume=resume)).folder == Path("runs/mine")
    assert resolve(options(resume="runs/mine", out="x")).folder == Path("x")


def test_the_resume_command_repeats_what_was_asked(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    arguments = ["--steps", "5", "--model.num-layers=6", "--resume=old", "--prompt", "a b", "--weights", "given"]
    expected = "python train.py --model.num-layers=6 --prompt 'a b' --resume runs/x --steps 10"
    assert resume_command(arguments, "runs/x", 10) == expected
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert resume_command([], "runs/x", 10) == "torchrun --nproc-per-node 4 train.py --resume runs/x --steps 10"
    monkeypatch.setenv("PATH", "/elsewhere")  # nobody activated the environment: name the program by its path
    assert resume_command([], "runs/x", 10).split()[0] == os.path.relpath(Path(sys.executable).with_name("torchrun"))


def test_a_preset_gives_the_defaults_of_the_model():
    config = parse_arguments(["--preset", "small", "--model.num-layers", "3", "--optim.lr", "0.5"])
    assert (config.model.num_layers, config.model.hidden_size, config.optim.lr) == (3, 768, 0.5)
    assert parse_arguments(["--preset=small"]).model.hidden_size == 768
    assert parse_arguments([]) == TrainConfig()
