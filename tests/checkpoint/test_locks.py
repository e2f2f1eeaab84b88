"""Locks: a folder has one writer, and a run that saves removes no checkpoint that another program reads."""

import functools
import os
import shutil
import signal
import time

import pytest
import torch.distributed as dist

from moe_dualpipe import cli
from moe_dualpipe.checkpoint import destinations, load
from moe_dualpipe.checkpoint.destinations import hold_newest, release, remove_old
from moe_dualpipe.commands.train import main as train_main
from moe_dualpipe.data.files import LOCK_FILE, FolderInUseError, only_writer
from moe_dualpipe.expert_parallel.gather import gather_objects
from moe_dualpipe.training import restart, train
from tests.support import ranks
from tests.support.checkpoints import checkpoint_names
from tests.support.runs import SMALL, change, settings

# ---- One writer: who has a folder, who gets it next, and when ----


def hold(folder, pipe):
    """Hold the lock in a process while a child of it goes on, until the process is killed."""
    with only_writer(folder, folder / LOCK_FILE, 0.0):
        if not (pid := os.fork()):
            time.sleep(60)
            os._exit(0)
        pipe.send(pid)
        pipe.recv()


def test_a_killed_process_frees_the_folder_although_its_child_goes_on(tmp_path):
    folder = tmp_path / "new"
    here, there = ranks._context.Pipe()
    with ranks.started(hold, [(folder, there)]) as [process]:
        child, host = here.recv(), os.uname().nodename
        said = f"^{folder} is being written by process {process.pid} on {host}: wait until it ends, stop it"
        for _ in range(2):  # nor does an attempt that failed free it
            with pytest.raises(FolderInUseError, match=said), only_writer(folder, folder / LOCK_FILE, 0.0):
                pass
    with only_writer(folder, folder / LOCK_FILE, 5.0):
        with pytest.raises(FolderInUseError), only_writer(folder, folder / LOCK_FILE, 0.0):
            pass
        os.kill(child, signal.SIGKILL)
    assert not [*folder.glob(".*")], "a lock stays"


@pytest.mark.parametrize("name,why", [("/proc/x", "No such file or directory"), ("file", "it is not a folder")])
def test_a_folder_that_cannot_be_made_is_named(tmp_path, name, why):
    (tmp_path / "file").touch()
    folder = tmp_path / name
    message = f"^cannot write to {folder}: {why}; use another folder$"
    with pytest.raises(ValueError, match=message), only_writer(folder, folder / LOCK_FILE, 0.0):
        pass


def test_a_second_run_is_refused_and_the_first_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(restart, "GRACE", 0.0)
    config, said = settings(tmp_path / "run", steps=1), []

    def start_another(*_):
        with pytest.raises(ValueError, match=r"is being written by process \d+ on .*: wait until it ends, ") as caught:
            train(config)
        said.append(str(caught.value))

    train(config, [start_another], verbose=False)
    assert len(said) == 1 and not any("\n" in text for text in said)
    assert not (tmp_path / "run" / LOCK_FILE).exists()


def test_a_resumed_run_goes_on_from_what_the_run_before_it_saved_last(tmp_path, monkeypatch):
    run = tmp_path / "run"
    config = settings(run, steps=2, save_every=1)
    train(config, verbose=False)
    last, not_yet = run / "checkpoints" / "step-000002", tmp_path / "later"
    last.rename(not_yet)

    def once_the_other_has_ended(*arguments):
        not_yet.rename(last)
        return only_writer(*arguments)

    monkeypatch.setattr(restart, "only_writer", once_the_other_has_ended)
    assert train(change(config, out=None, resume=str(run), steps=3), verbose=False).run.start.first_step == 2


# ---- Programs that read a run while it saves after every step and keeps one checkpoint ----


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
    assert ranks.run_ranks(2, steps_that_ranks_find, run) == [1, 1]
