"""One writer for a folder, on a file system and on an S3 server: who has it, who gets it next, and when."""

import os
import signal
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moe_dualpipe.checkpoint import folder_lock
from moe_dualpipe.checkpoint.atomic_folder import write_folder
from moe_dualpipe.checkpoint.folder_lock import LOCK_FILE, FolderInUseError, only_writer
from moe_dualpipe.data.stores import Url, read, staged_folder, write
from moe_dualpipe.training import agreement, train
from moe_dualpipe.training.metrics import read_records
from tests.support import ranks
from tests.support.object_store import access, first
from tests.support.runs import SMALL, change, command, losses, settings

URL = "s3://bucket/run"
MARKER = Url(URL) / LOCK_FILE


@pytest.fixture(params=["folder", "s3"])
def place(request, tmp_path, monkeypatch):
    """The environment of a process, and what names the folder."""
    monkeypatch.setattr(folder_lock, "GRACE", 0.0)
    return (access(request.getfixturevalue("s3")), URL) if request.param == "s3" else ({}, str(tmp_path))


def lock(name, wait=0.0):
    folder = staged_folder(Url(name)) if name.startswith("s3:") else Path(name)
    return only_writer(folder, folder / LOCK_FILE, wait)


def hold(environment, name, pipe, renew=30.0, fork=False):
    """Hold the lock in a process, until it is told to end. fork: a child goes on meanwhile."""
    os.environ.update(environment)
    tempfile.tempdir, folder_lock.RENEW = None, renew
    try:
        with lock(name):
            pid = os.fork() if fork else None
            if pid == 0:
                time.sleep(60)
                os._exit(0)
            pipe.send(pid or "held")
            pipe.recv()
    except FolderInUseError as error:
        pipe.send(str(error))


def start(place, **options):
    here, there = ranks._context.Pipe()
    process = ranks._context.Process(target=hold, args=(*place, there), kwargs=options, daemon=True)
    process.start()
    return process, here


def test_a_second_process_gets_one_line_and_the_folder_once_the_first_has_ended(place):
    with lock(place[1]):
        process, pipe = start(place)
        said = pipe.recv()
        assert said.startswith(f"{place[1]} is being written by process {os.getpid()} on {os.uname().nodename}")
        assert said.endswith(": wait until it ends, stop it, or use another folder") and "\n" not in said
        with pytest.raises(FolderInUseError), lock(place[1]):  # nor does another thread
            pass
    process.join(60)
    process, pipe = start(place)
    assert pipe.recv() == "held"
    pipe.send("end")
    process.join(60)
    with lock(place[1]):
        pass
    assert not list(Path(place[1]).glob(".*")), "a lock stays"


@pytest.mark.parametrize("fork", [False, True])
def test_the_folder_of_a_process_that_was_killed_is_free_at_once(place, fork):
    process, pipe = start(place, fork=fork)
    said = pipe.recv()
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    with lock(place[1], wait=5.0):
        pass
    if fork:
        os.kill(said, signal.SIGKILL)


# ---- The marker on a store ----


@pytest.fixture
def of_another_machine(s3):
    """The marker of a process on another machine."""
    with lock(URL):
        written = read(MARKER).replace(b"\n", b"\nother ", 1)
    write(MARKER, written)
    return s3


def test_a_marker_of_another_machine_holds_until_it_expires(of_another_machine, monkeypatch):
    said = r"\(seen \d s ago; if it has died, try again in \d+ s\): wait until"
    with pytest.raises(FolderInUseError, match=said), lock(URL):
        pass
    monkeypatch.setattr(folder_lock, "EXPIRES", 0.0)
    with lock(URL):
        assert b"other" not in read(MARKER)
    assert of_another_machine.names() == []


def test_only_one_process_replaces_a_marker_that_has_expired(of_another_machine, monkeypatch):
    """Another one is faster, between the look at the old marker and the write of the new one."""
    monkeypatch.setattr(folder_lock, "EXPIRES", 0.0)

    def replace(request):
        if request.method == "PUT" and request.path.endswith(LOCK_FILE):
            of_another_machine.fault = lambda _: None
            of_another_machine.put("run/.lock", b"process 7 on faster")

    of_another_machine.fault = replace
    with pytest.raises(FolderInUseError, match="process 7 on faster"), lock(URL):
        pass
    assert of_another_machine.content("run/.lock") == b"process 7 on faster"


def test_a_marker_is_renewed_and_one_whose_answer_was_lost_is_still_ours(s3, monkeypatch):
    monkeypatch.setattr(folder_lock, "RENEW", 0.05)
    lost = [first(1, "cut", lambda request: request.method == "PUT")]
    renewed = threading.Event()

    def fault(request):
        if sum(one.method == "PUT" for one in s3.requests) > 3:
            renewed.set()
        return lost[0](request)

    s3.fault = fault
    with lock(URL):
        assert renewed.wait(30)
        lost[0] = first(2, 500)
        renewed.clear()
        assert renewed.wait(30)


def test_a_process_whose_folder_was_taken_ends_before_it_writes_more(s3):
    process, pipe = start((access(s3), URL), renew=0.05)
    assert pipe.recv() == "held"
    s3.put("run/.lock", b"{}")
    process.join(60)
    assert process.exitcode == 1 and s3.content("run/.lock") == b"{}"


def test_a_server_without_conditional_writes_is_used_without(s3):
    s3.fault = lambda request: 501 if request.conditional else None
    with lock(URL), pytest.raises(FolderInUseError), lock(URL):
        pass
    assert s3.names() == []


# ---- Exports and runs ----


def test_a_second_run_is_refused_and_the_first_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "GRACE", 0.0)
    config, said = settings(tmp_path / "run", steps=2), []

    def start_another(*_):
        with pytest.raises(ValueError, match=r"is being written by process \d+ on .*: wait until it ends, ") as caught:
            train(config)
        said.append(str(caught.value))

    train(config, [start_another], verbose=False)
    assert len(said) == 2 and not any("\n" in text for text in said)
    assert not (tmp_path / "run" / LOCK_FILE).exists()


def test_a_resumed_run_goes_on_from_what_the_run_before_it_saved_last(tmp_path, monkeypatch):
    run = tmp_path / "run"
    config = settings(run, steps=2, save_every=1)
    train(config, verbose=False)
    last, not_yet = run / "checkpoints" / "step-000002", tmp_path / "later"
    last.rename(not_yet)
    only_writer = agreement.only_writer

    def once_the_other_has_ended(*arguments):
        not_yet.rename(last)
        return only_writer(*arguments)

    monkeypatch.setattr(agreement, "only_writer", once_the_other_has_ended)
    assert train(change(config, out=None, resume=str(run), steps=3), verbose=False).run.first_step == 2


@pytest.mark.long
def test_of_two_commands_at_once_one_trains(tmp_path):
    arguments = (*SMALL, "--out", tmp_path / "run", "--steps", 30)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(command, *arguments, processes=2) for _ in range(2)]
    good, bad = sorted((run.result() for run in runs), key=lambda run: run.returncode)
    assert good.returncode == 0 and bad.returncode != 0
    lines = [line for line in bad.stderr.splitlines() if line.startswith("train.py: error")]
    assert len(lines) == 1 and f"{tmp_path}/run is being written by process" in lines[0]
    assert [*losses(read_records(tmp_path / "run"))] == [*range(1, 31)]


def test_a_second_export_is_refused_and_the_first_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "GRACE", 0.0)
    out = tmp_path / "out"

    def export_another(_folder):
        with pytest.raises(FolderInUseError, match=f"{out} is being written by process {os.getpid()} on "):
            write_folder(out, lambda _: None, lambda _: {"config.json": b"second"})

    write_folder(out, export_another, lambda _: {"config.json": b"first"})
    assert [path.read_bytes() for path in out.iterdir()] == [b"first"]
    with pytest.raises(ValueError, match="already exists"):
        write_folder(out, lambda _: None, lambda _: {})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
