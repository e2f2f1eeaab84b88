"""One writer for a folder: who has it, who gets it next, and when."""

import os
import signal
import time

import pytest

from moe_dualpipe.data.files import LOCK_FILE, FolderInUseError, only_writer
from moe_dualpipe.training import restart, train
from tests.support import ranks
from tests.support.runs import change, settings


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
