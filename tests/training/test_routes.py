"""Recorded routes: replayed, a run has its own losses bit for bit; and they are those of any layout and program."""

import dataclasses
import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import moe_dualpipe
from moe_dualpipe.checkpoint.routes import RecordedRoutes, run_of_file, write_routes
from moe_dualpipe.cli import main
from moe_dualpipe.models import MoE
from tests.support.checkpoints import FullDisk
from tests.support.ranks import run_ranks
from tests.support.runs import (
    MODEL,
    change,
    equal_tensors,
    losses,
    make_trainer,
    settings,
    train,
    train_each,
    train_in_memory,
    without_clocks,
)

GROUPS = dataclasses.replace(
    MODEL, num_layers=3, num_experts=8, experts_per_token=3, router_bias=True, router_score="sigmoid", z_loss=0.01,
    expert_groups=4, top_groups=2,
)  # fmt: skip
RUN = {"model": GROUPS, "steps": 2, "seq_len": 16, "batch_size": 8, "document_mask": True, "bias_rate": 0.05}
OTHER = {"pp": 1, "ep": 2, "cp": 2, "micro_batch_size": 2, "recompute": "attention"}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The routes of a run on two ranks under DualPipe."""
    folder = tmp_path_factory.mktemp("recorded")
    run_ranks(2, train, settings(folder / "run", record_routes=str(folder / "routes"), **RUN))
    return folder / "routes"


def test_a_run_that_replays_its_own_routes_has_its_losses_bit_for_bit(tmp_path, recorded):
    plain = settings(tmp_path / "plain", **RUN)
    same = change(plain, out=str(tmp_path / "same"), replay_routes=str(recorded), recompute="full")
    other = change(same, out=str(tmp_path / "other"), **OTHER)
    expected, found, run = run_ranks(2, train_each, [plain, same, other])[0]
    assert without_clocks(found) == without_clocks(expected)
    # The routes are the same, and products and sums round otherwise.
    assert losses(run) == pytest.approx(losses(expected), rel=1e-5)
    assert losses(run, "expert_load_max_over_mean") == losses(expected, "expert_load_max_over_mean")


def other_routes(folder, tmp_path):
    """The routes of all samples in one file: other experts, but for the second half of each sequence."""
    routes, tensors = RecordedRoutes(folder, {"experts_per_token": 3, "num_experts": 8}), {}
    for layer, rows in routes.rows.items():
        experts_NSK = (routes.read(layer, sorted(rows), 16) + 1) % 8
        experts_NSK[:, 8:] = -1
        tensors[f"layers.{layer}.experts"] = experts_NSK[:, :12].to(torch.int16)
        tensors[f"layers.{layer}.samples"] = torch.tensor(sorted(rows))
    save_file(tensors, tmp_path / "other.safetensors")
    return tmp_path / "other.safetensors"


def replayed_step(rank, config):
    """Whether each layer of this rank has the routes that are known, and chooses the others itself."""
    trainer = make_trainer(rank, config)
    trainer.step(0)
    own = [i for stage in trainer.stages.values() for i in stage.modules() if isinstance(i, MoE)]
    for layer in own:
        given, taken = layer.replayed_RSK, layer.recorded_RSK
        here = (taken >= 0).flatten(1).any(1)
        assert here.any() and (given[:, 8:] == -1).all()
        assert torch.equal(given[here, :8], taken[here, :8]) and (taken[here, 8:] >= 0).all()
    return len(own)


def test_other_routes_are_taken_where_they_are_known(tmp_path, recorded):
    config = settings(tmp_path / "run", replay_routes=str(other_routes(recorded, tmp_path)), **RUN)
    config = change(config, record_routes=str(tmp_path / "again"), recompute="full")
    assert run_ranks(2, replayed_step, config) == [2, 2]  # under DualPipe, each rank has all layers


def test_generate_records_what_the_router_chooses_for_the_text(tmp_path, refused):
    folder, file = tmp_path / "run", tmp_path / "texts.safetensors"
    run_ranks(1, train, settings(folder, steps=1, model=dataclasses.replace(MODEL, num_layers=3)))
    written = ["--prompt", "def ", "--sample-tokens", "5", "--num", "3", "--record-routes", str(file)]
    assert main(["generate", str(folder), *written]) == 0
    found = load_file(file)
    assert {name: (tensor.dtype, [*tensor.shape]) for name, tensor in found.items()} == {
        f"layers.{layer}.{name}": shape
        for layer in (1, 2)
        for name, shape in (("experts", (torch.int16, [3, 8, 2])), ("samples", (torch.int64, [3])))
    }  # fmt: skip
    assert found["layers.1.samples"].tolist() == [0, 1, 2]
    assert (found["layers.1.experts"][0, :4] == found["layers.1.experts"][2, :4]).all()  # of the same prompt
    message = "--record-routes needs --seq-len 9 or more, for the whole text: got 8"
    assert message in refused("generate", folder, *written, "--seq-len", 8)


ANOTHER = "has the routes of another run: "
STEP = "step-000002-rank-0.safetensors"


@pytest.mark.parametrize("changes,problem", [
    ({"steps": 3}, "routes has no routes of sample 16 in layer 1"),
    ({"replay_routes": "nowhere/routes"}, "cannot read nowhere/routes: No such file"),
    ({"replay_routes": "{}"}, "has no routes: name a folder that record_routes wrote"),
    ({"seq_len": 12}, f"{ANOTHER}seq_len 16, not 12"),
    ({"batch_size": 16, "seed": 1}, f"{ANOTHER}batch_size 8, not 16, seed 0, not 1"),
    ({"data": (str(Path(json.__file__).parent),)}, f"{ANOTHER}data '[0-9a-f]+', not '"),
    ({"model": dataclasses.replace(GROUPS, num_dense_layers=2)}, rf"{ANOTHER}layers \[1, 2\], not \[2\]"),
    ({"model": dataclasses.replace(GROUPS, experts_per_token=2)}, f"{ANOTHER}experts_per_token 3, not 2"),
    ({"model": dataclasses.replace(GROUPS, router="balanced", z_loss=0.0)}, "replay_routes needs --router topk: got"),
    ({"record_routes": "s3://bucket/routes"}, "record_routes s3://bucket/routes must be a local folder"),
    ({"replay_routes": "s3://bucket/routes"}, "replay_routes s3://bucket/routes must be a local folder"),
    ({"record_routes": __file__}, "cannot write to record_routes .*test_routes.py: File exists"),
    ({"record_routes": "/proc/routes"}, "cannot write to record_routes /proc/routes: No such file"),
], ids=str)  # fmt: skip
def test_routes_that_do_not_fit_are_one_line(tmp_path, recorded, changes, problem):
    changes = {name: value.format(tmp_path) if isinstance(value, str) else value for name, value in changes.items()}
    config = settings(tmp_path / "new", **{**RUN, "replay_routes": str(recorded), **changes})
    with pytest.raises(ValueError, match=problem):
        moe_dualpipe.train(config, verbose=False)


def one_more_file(folder):
    shutil.copy(folder / STEP, folder / "more.safetensors")


def change_tensors(change, folder):
    """Change the tensors of a step."""
    tensors = load_file(folder / STEP)
    change(tensors)
    save_file(tensors, folder / STEP)


def set_experts(value, place, tensors):
    tensors["layers.2.experts"][0, 5, place] = value


def as_floats(tensors):
    tensors["layers.2.experts"] = tensors["layers.2.experts"].float()


def with_other_k(tensors):
    tensors["layers.2.experts"] = tensors["layers.2.experts"][..., :2].contiguous()


def of_another_run(folder):
    tensors = load_file(folder / STEP)
    save_file({name: tensor + 100 for name, tensor in tensors.items()}, folder / "more.safetensors",
              {"run": '{"seed": 7}'})  # fmt: skip


NEED = f"{STEP}: sample [0-9]+ of layer 2 needs at most 16 positions, each with 3 different experts below 8, or -1 fir"


@pytest.mark.parametrize("damage,problem", [
    (one_more_file, f"{STEP}: sample [0-9]+ of layer [123] is also in .*more.safetensors: remove the files of another"),
    (of_another_run, f"more.safetensors {ANOTHER}seed 7, not 0"),
    (partial(change_tensors, partial(set_experts, 8, 0)), NEED),
    (partial(change_tensors, partial(set_experts, -1, 1)), NEED),
    (partial(change_tensors, partial(set_experts, -2, 0)), NEED),
    (partial(change_tensors, lambda tensors: set_experts(tensors["layers.2.experts"][0, 5, 0], 1, tensors)), NEED),
    (partial(change_tensors, as_floats), r"needs layers.2.experts .*: got torch.float32 \[8, 16, 3\] and torch.int64"),
    (partial(change_tensors, with_other_k), r"needs layers.2.experts .*: got torch.int16 \[8, 16, 2\] and torch.int64"),
    (partial(change_tensors, lambda tensors: tensors.pop("layers.2.samples")), r"\] and nothing"),
], ids=range(9))  # fmt: skip
def test_routes_that_no_router_can_choose_are_found_before_the_first_step(tmp_path, recorded, damage, problem):
    folder = tmp_path / "routes"
    merge(recorded, folder)
    damage(folder)
    config = settings(tmp_path / "new", replay_routes=f"file://{folder}", **RUN)
    with pytest.raises(ValueError, match=problem):
        moe_dualpipe.train(config, verbose=False)
    assert not (tmp_path / "new").exists()


def merge(recorded, folder):
    """The routes of two ranks in one file a step."""
    folder.mkdir()
    for step in (1, 2):
        files = sorted(recorded.glob(f"step-{step:06d}-*"))
        parts = [load_file(file) for file in files]
        run = {"run": json.dumps(run_of_file(files[0]))}
        save_file({name: torch.cat([part[name] for part in parts]) for name in parts[0]},
                  folder / f"step-{step:06d}-rank-0.safetensors", run)  # fmt: skip


def test_a_folder_has_each_step_of_one_run_once(tmp_path, recorded):
    """A run that is started again, on fewer ranks, replaces what it recorded before."""
    folder = tmp_path / "routes"
    shutil.copytree(recorded, folder)
    config = settings(tmp_path / "run", record_routes=str(folder), **RUN)
    train_in_memory(change(config, save_every=1))
    assert [file.name for file in sorted(folder.iterdir())] == ["step-000001-rank-0.safetensors", STEP]
    (folder / STEP).chmod(0o600)
    resumed = change(config, resume=str(tmp_path / "run" / "checkpoints" / "step-000001"), out=str(tmp_path / "more"))
    before = load_file(folder / STEP)
    train_in_memory(resumed)
    assert equal_tensors(load_file(folder / STEP), before)
    assert (folder / STEP).stat().st_mode & 0o777 == 0o666 & ~umask()
    again = change(resumed, out=None, resume=None)
    with pytest.raises(ValueError, match=f"{ANOTHER}batch_size 8, not 4"):
        train_in_memory(change(again, batch_size=4))
    (folder / STEP).rename(folder / "more.safetensors")
    with pytest.raises(ValueError, match=r"more\.safetensors is not of this run: use an empty folder"):
        train_in_memory(again)


@pytest.mark.parametrize("record", ["routes", "link"])
def test_routes_that_are_replayed_are_not_recorded_over(tmp_path, recorded, record):
    merge(recorded, tmp_path / "routes")
    (tmp_path / "link").symlink_to("routes")
    before = [*(tmp_path / "routes").iterdir()]
    paths = {"record_routes": str(tmp_path / record), "replay_routes": str(tmp_path / "routes")}
    with pytest.raises(ValueError, match="is one of replay_routes: use another folder"):
        train_in_memory(settings(tmp_path / "run", **RUN, **paths))
    assert [*(tmp_path / "routes").iterdir()] == before


def umask():
    current = os.umask(0)
    os.umask(current)
    return current


def test_a_full_disk_is_one_line_and_leaves_other_files(tmp_path, monkeypatch):
    (tmp_path / "notes.tmp").write_text("mine")
    FullDisk(monkeypatch)
    with pytest.raises(ValueError, match=r"^cannot write .*/notes.safetensors: No space left on device$"):
        write_routes(tmp_path / "notes.safetensors", {1: (torch.arange(2), torch.zeros(2, 3, 1))}, {})
    assert [file.name for file in tmp_path.iterdir()] == ["notes.tmp"]
