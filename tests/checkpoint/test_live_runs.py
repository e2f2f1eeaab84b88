"""Programs that read a run while it saves after every step and keeps one checkpoint."""

import functools
import shutil

import pytest
import torch.distributed as dist

from moe_dualpipe import cli
from moe_dualpipe.checkpoint import destinations, load
from moe_dualpipe.checkpoint.destinations import hold_newest, release, remove_old
from moe_dualpipe.commands.train import main as train_main
from moe_dualpipe.expert_parallel.gather import gather_objects
from tests.support.checkpoints import checkpoint_names
from tests.support.ranks import run_ranks
from tests.support.runs import SMALL

OPTIONS = ["--device", "cpu", *map(str, SMALL), "--set", "model.num_shared_experts=0"]  # can be exported


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    train_main(["--out", str(folder), "--steps", "1", *OPTIONS])
    return folder


def save_again(run):
    """What a run that trains does: a checkpoint of the next step, without the earlier ones that nobody holds."""
    newest = max((run / "checkpoints").glob("step-*"))
    following = newest.with_name(f"step-{destinations.step_of(newest) + 1:06d}")
    shutil.copytree(newest, following)
    remove_old(following, 1)


def and_save(run, call, saves, folder, *options):
    """Call, and then save, a few times."""
    found = call(folder, *options)
    if next(saves, None) is not None:
        save_again(run)
    return found


@pytest.fixture
def live(trained, tmp_path, monkeypatch):
    """A copy of the run that saves whenever somebody has listed its checkpoints, and when one was found intact."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    for module, name in ((destinations, "list_checkpoints"), (load, "verify_checkpoint")):
        monkeypatch.setattr(module, name, functools.partial(and_save, run, getattr(module, name), iter(range(3))))
    monkeypatch.chdir(tmp_path)
    return run


@pytest.mark.parametrize("command", [
    ["generate", "run", "--sample-tokens", "2"],
    ["eval", "run", "--data", __file__, "--seq-len", "16", "--max-tokens", "64"],
    ["export", "run", "--out", "exported"],
    ["train", "--resume", "run", "--out", "other", "--steps", "9", "--device", "cpu"],
    ["train", "--weights", "run", "--steps", "1", *OPTIONS],
], ids=lambda command: " ".join(command[:2]))  # fmt: skip
def test_a_run_that_saves_can_be_read(live, command):
    if command[0] == "train":
        train_main(command[1:])
    else:
        assert cli.main(command) == 0
    release()  # as at the end of the command
    read = len(checkpoint_names(live))
    save_again(live)
    assert len(checkpoint_names(live)) == 1 < read


def steps_that_ranks_find(rank, run):
    """Each rank finds the newest checkpoint some time after the others, while the run saves."""
    limit = gather_objects(hold_newest(str(run)))[0]
    for turn in range(2):
        if turn == rank:
            save_again(run)
            found = destinations.step_of(load.find_weights(str(run), limit))
        dist.barrier()
    return found


def test_ranks_find_the_same_checkpoint_of_a_run_that_saves(trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    assert run_ranks(2, steps_that_ranks_find, run) == [1, 1]
