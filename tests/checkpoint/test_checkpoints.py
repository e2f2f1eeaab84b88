"""Checkpoints: written whole or not at all, while training goes on; broken and hostile ones; other divisions of ranks.

Most tests write small states by hand; the last ones train.
"""

import contextlib
import dataclasses
import errno
import io
import json
import os
import pickle
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_dualpipe.checkpoint import (
    SaveError,
    Saver,
    check_model,
    find_checkpoint,
    load_checkpoint,
    manifest,
    read_manifest,
    save_checkpoint,
    verify_checkpoint,
)
from moe_dualpipe.checkpoint import save as save_module
from moe_dualpipe.checkpoint.manifest import FileChecksum, Manifest
from moe_dualpipe.models import ModelConfig
from moe_dualpipe.training.command_line import parse_arguments
from moe_dualpipe.training.loop import Run
from tests.support import ranks
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, losses, make_trainer, records, resolve, settings, train, train_each


def state_of(rank, step):
    """A tensor that both ranks hold and one of each rank's own, of awkward shapes; all values tell the step."""
    return {
        "both": torch.full((3, 1, 5), float(step)),
        f"rank{rank}": torch.full((1, 7 + rank), step + rank / 2),
        f"scalar{rank}": torch.tensor(step, dtype=torch.int64),
    }


def contents(folder):
    """What the two ranks would load, on a process of its own; checked to be all of one step, which is returned."""
    loaded = {name: torch.full_like(t, -1) for rank in (0, 1) for name, t in state_of(rank, 0).items()}
    load_checkpoint(folder, loaded)
    step = int(loaded["both"][0, 0, 0])
    for rank in (0, 1):
        for name, expected in state_of(rank, step).items():
            assert torch.equal(loaded[name], expected), name
    return step


def names(run):
    return sorted(path.name for path in (Path(run) / "checkpoints").iterdir())


def save_steps(rank, run, steps, keep=0):
    for step in steps:
        save_checkpoint(run, step, state_of(rank, step), ModelConfig(), {"tokens.txt": b"a b c"}, keep)
    return names(run)


@pytest.fixture(scope="module")
def two_ranks_run(tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    run_ranks(2, save_steps, run, [3, 5, 9])
    return run


@pytest.fixture
def run(two_ranks_run, tmp_path):
    """A run of two ranks with checkpoints after 3, 5 and 9 steps, to be broken."""
    return Path(shutil.copytree(two_ranks_run, tmp_path / "run"))


def newest(run):
    return run / "checkpoints" / "step-000009"


def reseal(folder):
    """Make run.json agree with the files, as somebody who means harm would."""
    old = json.loads((folder / "run.json").read_text())
    files = {path.name: FileChecksum.of(path.read_bytes()) for path in folder.iterdir() if path.name != "run.json"}
    (folder / "run.json").write_bytes(Manifest(old["step"], old["model"], files).encode())


# ---- Keeping ----


def test_a_checkpoint_holds_what_every_rank_saved_and_the_files_beside(run):
    assert contents(find_checkpoint(str(run))) == 9
    assert (newest(run) / "tokens.txt").read_bytes() == b"a b c"
    assert "tokens.txt" in verify_checkpoint(newest(run)).files


def save_and_remove(rank, run, saves):
    return [save_steps(rank, run, steps, keep) for steps, keep in saves]


def test_older_checkpoints_and_remnants_go_when_a_newer_one_is_complete(run):
    for remnant in (".step-000009.unfinished", ".step-000003.removed"):
        (run / "checkpoints" / remnant / "below").mkdir(parents=True)
    # Steps after the new one belong to a run that went on elsewhere: they are nobody's to remove.
    left = run_ranks(1, save_and_remove, run, [([7], 2), ([10], 1), ([11, 11, 12], 0)])[0]
    assert left == [
        ["step-000005", "step-000007", "step-000009"], ["step-000010"], ["step-000010", "step-000011", "step-000012"],
    ]  # fmt: skip


# ---- Broken checkpoints ----


def flip_bit(path, byte, bit=3):
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


DAMAGES = {
    "truncated": (lambda c: truncate(c / "__1_0.distcp"), "__1_0.distcp has 3,"),
    "longer": (lambda c: (c / "__0_0.distcp").open("ab").write(b"x"), "__0_0.distcp has "),
    "flipped": (lambda c: flip_bit(c / "__1_0.distcp", 1000), "__1_0.distcp does not match its checksum"),
    "lost": (lambda c: (c / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "a lost file beside": (lambda c: (c / "tokens.txt").unlink(), "tokens.txt is missing"),
    "a folder": (lambda c: [(c / "tokens.txt").unlink(), (c / "tokens.txt").mkdir()], "tokens.txt is missing"),
    "no run.json": (lambda c: (c / "run.json").unlink(), "cannot read run.json: No such file"),
    "an empty run.json": (lambda c: (c / "run.json").write_bytes(b""), "cannot read run.json: Expecting value"),
    "another step": (
        lambda c: (c / "run.json").write_text((c / "run.json").read_text().replace('"step": 9', '"step": 8')),
        "cannot read run.json: its checksum does not match",
    ),
    "garbage": (lambda c: [path.unlink() for path in c.iterdir()], "cannot read run.json: No such file"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_checkpoint_is_named_and_the_newest_good_one_is_used(run, damage):
    harm, reason = DAMAGES[damage]
    harm(newest(run))
    told = []
    found = find_checkpoint(str(run), told.append)
    assert contents(found) == 5
    (line,) = told
    assert line.startswith(f"skipped broken checkpoint {newest(run)}: {reason}")
    with pytest.raises(ValueError) as error:
        find_checkpoint(str(newest(run)))
    assert str(error.value).startswith(f"{newest(run)} is broken: {reason}")
    assert str(error.value).endswith(f"; the newest intact checkpoint of this run is {found}")


def test_no_good_checkpoint_is_an_error_that_names_all(run):
    for path in (run / "checkpoints").iterdir():
        truncate(path / "__0_0.distcp")
    with pytest.raises(
        ValueError, match=r"all checkpoints in .* are broken: .*step-000009: __0_0.*step-000005: .*step-000003: "
    ):
        find_checkpoint(str(run))
    with pytest.raises(ValueError, match=r"is broken: .*; this run has no intact checkpoint"):
        find_checkpoint(str(newest(run)))


def test_every_flipped_bit_is_found(run):
    chance = random.Random(0)
    for path in sorted(newest(run).iterdir()):
        whole = path.read_bytes()
        for _ in range(12):
            flip_bit(path, chance.randrange(len(whole)), chance.randrange(8))
            with pytest.raises(ValueError, match=r"run\.json|does not match its checksum"):
                verify_checkpoint(newest(run))
            path.write_bytes(whole)
    assert verify_checkpoint(newest(run)).step == 9


def load_own(rank, folders):
    with pytest.raises(ValueError, match="the ranks found different checkpoints"):
        load_checkpoint(folders[rank], state_of(rank, 0))
    lacking = {f"missing{rank}": torch.zeros(1)} if rank else {}
    with pytest.raises(ValueError, match="has no missing1"):  # on the rank that misses nothing, too
        load_checkpoint(folders[0], state_of(rank, 0) | lacking)
    with pytest.raises(ValueError, match=r": rank1 has shape \[1, 8\], expected \[2, 4\]"):
        load_checkpoint(folders[0], {"rank1": torch.zeros(2, 4)})
    load_checkpoint(folders[0], state := state_of(rank, 0))
    return int(state["both"][0, 0, 0])


def test_ranks_agree_on_what_they_load(run):
    folders = [run / "checkpoints" / f"step-00000{step}" for step in (5, 9)]
    assert run_ranks(2, load_own, folders) == [5, 5]


# ---- Files that somebody else wrote ----


class Attack:
    """Leaves a marker when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


def test_the_attacks_below_are_real(tmp_path):
    buffer = io.BytesIO()
    torch.save(Attack(tmp_path / "marker"), buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=False)
    assert (tmp_path / "marker").exists()


def test_a_hostile_metadata_pickle_is_never_opened(run):
    marker = run / "marker"
    (newest(run) / ".metadata").write_bytes(pickle.dumps(Attack(marker)))
    reseal(newest(run))
    assert contents(find_checkpoint(str(run))) == 9
    assert not marker.exists()


def payload_of(kind, marker):
    if kind == "pickle":
        return pickle.dumps(Attack(marker))
    buffer = io.BytesIO()
    torch.save(Attack(marker) if kind == "saved" else {"x": torch.zeros(1)}, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["pickle", "saved", "no tensor"])
def test_a_hostile_payload_is_refused(run, kind):
    marker = run / "marker"
    payload = payload_of(kind, marker).ljust(600, b"\0") if kind == "pickle" else payload_of(kind, marker)
    (newest(run) / "__0_0.distcp").write_bytes(payload)
    table = json.loads((newest(run) / "tensors.json").read_text())
    for place in table.values():
        place.update(file="__0_0.distcp", offset=0, length=len(payload))
    (newest(run) / "tensors.json").write_text(json.dumps(table))
    reseal(newest(run))
    with pytest.raises(ValueError, match=r"cannot load .*step-000009: rank 0: "):
        contents(find_checkpoint(str(run)))
    assert not marker.exists()


def edited(key, value):
    return lambda saved: {**saved, key: value}


def listed(name, length=1):
    return lambda saved: {**saved, "files": {**saved["files"], name: {"length": length, "crc32": 0}}}


BOMBS = {
    "a list": lambda _: [1, 2],
    "deep": lambda _: b"[" * 200_000,
    "binary": lambda _: b"\x80\x04\x95",
    "a negative step": edited("step", -1),
    "a step that is text": edited("step", "3"),
    "a step that is true": edited("step", True),
    "a huge step": lambda _: b'{"step": ' + b"9" * 10_000 + b"}",
    "a model that is a number": edited("model", 7),
    "files that are a list": edited("files", ["tensors.json"]),
    "no files": edited("files", {}),
    "a path upwards": listed("../../secret"),
    "a path from the root": listed("/etc/passwd"),
    "the folder above": listed(".."),
    "a length that is text": listed("x", "1"),
}


def write_json(path, change, checksum=True):
    saved = change(json.loads(path.read_text()))
    if checksum and isinstance(saved, dict):
        rest = {key: value for key, value in saved.items() if key != "checksum"}
        saved["checksum"] = manifest.zlib.crc32(json.dumps(rest, sort_keys=True).encode())
    path.write_bytes(saved if isinstance(saved, bytes) else json.dumps(saved).encode())


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_hostile_run_json_is_refused(run, bomb):
    write_json(newest(run) / "run.json", BOMBS[bomb])
    with pytest.raises(ValueError, match=r"step-000009 is broken: cannot read run.json: .{5,}"):
        find_checkpoint(str(newest(run)))
    with pytest.raises(ValueError, match=r"cannot read .*run.json: .{5,}"):
        check_model(newest(run), ModelConfig())


def test_a_name_beside_is_fine_and_no_checksum_stops_the_bombs(run):
    write_json(newest(run) / "run.json", listed("notes"))
    assert read_manifest(newest(run)).files["notes"] == FileChecksum(1, 0)


def test_a_huge_run_json_is_not_read(run, monkeypatch):
    monkeypatch.setattr(manifest, "_MAX_JSON_BYTES", 1000)
    with pytest.raises(ValueError, match=r"run\.json: it has more than 1,000 bytes"):
        read_manifest(newest(run))


@pytest.mark.parametrize("change,message", [
    ({"file": "../step-000005/__0_0.distcp"}, "is not a valid file name"),
    ({"file": "/etc/passwd"}, "is not a valid file name"),
    ({"file": 3}, "is not a valid file name"),
    ({"dtype": "save"}, "'save' is not a dtype"),
    ({"dtype": "nn.Module"}, "is not a dtype"),
    ({"shape": [-1]}, "is not a valid count"),
    ({"shape": [2**40, 2**40]}, "bytes cannot hold"),
    ({"shape": 5}, "not iterable"),
    ({"length": 1}, "1 bytes cannot hold"),
    ({"offset": None}, "is not a valid count"),
], ids=str)  # fmt: skip
def test_a_hostile_table_of_tensors_is_refused(run, change, message):
    write_json(newest(run) / "tensors.json", lambda saved: {**saved, "both": {**saved["both"], **change}}, False)
    reseal(newest(run))
    with pytest.raises(ValueError, match=rf"cannot read .*tensors.json: .*{message}"):
        contents(find_checkpoint(str(run)))


# ---- Failing and killed saves ----


class FullDisk:
    """Lets `room` bytes be written, and then none until `clear`."""

    def __init__(self, monkeypatch):
        self.room = 0
        write = save_module._ChecksumFile.write

        def limited(file, data):
            self.room -= memoryview(data).nbytes
            if self.room < 0:
                file.error = OSError(errno.ENOSPC, "No space left on device")
                raise file.error
            return write(file, data)

        monkeypatch.setattr(save_module._ChecksumFile, "write", limited)


def fail_in_the_end(rank, run):
    with pytest.MonkeyPatch.context() as patch:
        write_synced, before = save_module._write_synced, names(run)
        dist.barrier()

        def full(path, data):
            if path.name == "run.json":
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            write_synced(path, data)

        patch.setattr(save_module, "_write_synced", full)
        with pytest.raises(SaveError, match=r"rank 0: \[Errno 28\] No space left on device: .*run.json"):
            save_checkpoint(run, 20, state_of(rank, 0), ModelConfig(), keep=1)
    assert names(run) == before
    dist.barrier()


def save_on_full_disks(rank, run):
    with pytest.MonkeyPatch.context() as patch:
        fail_in_the_end(rank, run)
        disk = FullDisk(patch)
        chance = random.Random(1)
        before = names(run)
        dist.barrier()
        for attempt in range(8):
            full, room = chance.randrange(2), chance.randrange(3000)
            disk.room = room if rank == full else 10**9
            reason = rf"rank {full}: \[Errno 28\] No space left on device$"
            with pytest.raises(SaveError, match=reason):
                save_checkpoint(run, 20 + attempt, state_of(rank, 0), ModelConfig(), keep=1)
            assert names(run) == before, (full, room)
            dist.barrier()
        disk.room = 10**9
        save_checkpoint(run, 40, state_of(rank, 40), ModelConfig(), keep=1)
    return names(run)


def test_a_full_disk_on_one_rank_fails_the_save_on_all_and_leaves_nothing(run):
    assert run_ranks(2, save_on_full_disks, run) == [["step-000040"]] * 2
    assert contents(find_checkpoint(str(run))) == 40


def save_forever(store, rank, run, first):
    """A rank that saves again and again, slowly."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    write = save_module._ChecksumFile.write

    def slow(file, data):
        time.sleep(0.002)
        return write(file, data)

    setattr(save_module._ChecksumFile, "write", slow)  # noqa: B010
    for step in range(first, 10**6):
        save_checkpoint(run, step, state_of(rank, step), ModelConfig(), keep=2)


def fork(function, *args):
    pid = os.fork()
    if not pid:
        try:
            function(*args)
        finally:
            os._exit(1)
    return pid


def wait_for(path):
    """The time when `path` is there."""
    begun = time.monotonic()
    while not path.exists():
        assert time.monotonic() < begun + 60, path
        time.sleep(0.001)
    return time.monotonic()


def kill_ten_times(results, run, scratch):
    """Reports of each kill: whether a save was on its way, what is said of the folder after it, and the step it has."""
    chance, step = random.Random(2), 9
    for kill in range(10):
        pids = [fork(save_forever, scratch / f"store{kill}", rank, run, step + 1) for rank in (0, 1)]
        begun = wait_for(run / "checkpoints" / f".step-{step + 1:06d}.unfinished")
        one_save = wait_for(run / "checkpoints" / f"step-{step + 1:06d}") - begun
        time.sleep(chance.uniform(0, 2 * one_save))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        in_a_save, told = any((run / "checkpoints").glob(".step-*.unfinished")), []
        found = find_checkpoint(str(run), told.append)
        step = contents(found)
        results.put((in_a_save, told, step, found.name))


def test_a_run_killed_in_a_save_goes_on_from_the_checkpoint_before(run, tmp_path):
    """Two ranks do nothing but save and are killed, ten times; the remnants of each time are in the way of the next."""
    results = ranks._context.SimpleQueue()
    process = ranks._context.Process(target=kill_ten_times, args=(results, run, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == 0
    reports = [results.get() for _ in range(10)]
    assert sum(in_a_save for in_a_save, *_ in reports) >= 6
    steps = [step for *_, step, _ in reports]
    assert steps == sorted(set(steps)) and steps[0] > 9
    for _, told, step, name in reports:
        assert not told, "a half-written checkpoint looked like a whole one"
        assert name == f"step-{step:06d}"
    assert run_ranks(1, save_steps, run, [steps[-1] + 1], 1)[0] == [f"step-{steps[-1] + 1:06d}"]


# ---- While training goes on ----


def save_while_changing(rank, run, background):
    """A save that cannot write before the state has changed; the step it then holds, and what was told meanwhile."""
    writes, write = threading.Event(), save_module.save_checkpoint

    def held(*arguments):
        assert writes.wait(60)
        return write(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_module, "save_checkpoint", held)
        if not background:
            writes.set()
        saver_ = Saver(run, ModelConfig(), keep=2, timeout=60, background=background)
        saver_.start(4, state := state_of(rank, 4))
        for tensor in state.values():
            tensor.fill_(-7)
        early = (saver_.busy, names(run) if run.joinpath("checkpoints").exists() else [])
        if background:
            assert saver_.poll() is None
        dist.barrier()
        writes.set()
        saved = saver_.wait()
        assert saver_.wait() is None
        saver_.close()
    assert saved is not None
    return early, saved.path.name, saved.error


def save_in_each_way(rank, run):
    ends = [save_while_changing(rank, run / str(background), background) for background in (True, False)]
    closed = Saver(run / "closed", ModelConfig(), keep=2, timeout=60)
    closed.start(4, state_of(rank, 4))
    closed.close()
    failing = Saver(run / "failing", ModelConfig(), keep=2, timeout=60)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as err:
        FullDisk(patch)
        failing.start(4, state_of(rank, 4))
        failing.close()
    told = ["No space left on device" in err.getvalue(), err.getvalue().count("could not be written")]
    return *ends, names(run / "closed"), told


def test_a_checkpoint_holds_the_state_of_its_moment_and_closing_finishes_it(tmp_path):
    later, at_once = ((True, []), "step-000004", ""), ((False, ["step-000004"]), "step-000004", "")
    first, second = run_ranks(2, save_in_each_way, tmp_path)
    assert first == (later, at_once, ["step-000004"], [True, 1])
    assert second == (later, at_once, ["step-000004"], [False, 0])
    for way in ("True", "False", "closed"):
        assert contents(find_checkpoint(str(tmp_path / way))) == 4


def save_slowly(rank, run):
    """Counts how often the thread that waits says that it is alive, while saves take two and a half seconds."""
    signs, write = [], save_module._write_synced
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_module, "_write_synced", lambda *args: (time.sleep(0.8), write(*args)))
        for background in (True, False):
            count = []
            saver_ = Saver(run / str(background), ModelConfig(), 2, 60, background, lambda c=count: c.append(0))
            saver_.start(4, state_of(rank, 4))
            saver_.wait()
            saver_.close()
            signs.append(len(count))
    return signs


def test_whoever_waits_for_a_slow_disk_is_alive(tmp_path):
    assert all(1 <= signs <= 30 for of_rank in run_ranks(2, save_slowly, tmp_path) for signs in of_rank)


SMALL = {"steps": 3, "seq_len": 8, "eval_sequences": 1, "save_every": 1}


def files_of(run):
    """Checksums of all that was saved; `.metadata` holds the time and the place, too."""
    return {
        (path.name, name): sum
        for path in sorted((Path(run) / "checkpoints").iterdir())
        for name, sum in verify_checkpoint(path).files.items()
        if name != ".metadata"
    }


def test_saving_in_the_background_changes_no_bit(tmp_path):
    configs = [settings(tmp_path / str(on), save_async=on, keep=2, **SMALL) for on in (True, False)]
    runs = run_ranks(2, train_each, configs)[0]
    assert losses(runs[0]) == losses(runs[1])
    assert names(tmp_path / "True") == ["step-000002", "step-000003"]
    assert files_of(tmp_path / "True") == files_of(tmp_path / "False") != {}


def train_on_a_disk_that_fills(rank, runs):
    """Saves fail on rank 1 at the steps given. For each run: exit code, checkpoints, and the errors told."""
    ends = []
    for config, full_at in runs:
        trainer, code = make_trainer(rank, config), 0
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as err:
            disk, save = FullDisk(patch), save_module.save_checkpoint

            def fail_at(run, step, *arguments, disk=disk, save=save, full_at=full_at):
                disk.room = 100 if rank == 1 and step in full_at else 10**9
                return save(run, step, *arguments)

            patch.setattr(save_module, "save_checkpoint", fail_at)
            try:
                Run(trainer).run()
            except SystemExit as exit_:
                code = exit_.code
        told = [line for line in err.getvalue().splitlines() if line.startswith("train.py: error: ")]
        ends.append((code, names(config.checkpoint.out), told))
    return ends


def test_training_goes_on_when_a_disk_is_full_and_ends_with_an_error_if_the_last_save_failed(tmp_path):
    reason = "rank 1: [Errno 28] No space left on device"
    failing = [[2], [1, 3]]
    configs = [settings(tmp_path / str(full_at), pp=1, **SMALL) for full_at in failing]
    ends = run_ranks(2, train_on_a_disk_that_fills, list(zip(configs, failing, strict=True)))
    for config, full_at, (code, left, told), (code1, _, told1) in zip(configs, failing, *ends, strict=True):
        assert code == code1 == (1 if 3 in full_at else 0)
        assert left == [f"step-00000{step}" for step in (1, 2, 3) if step not in full_at]
        folder = f"{config.checkpoint.out}/checkpoints"
        assert told == [f"train.py: error: {folder}/step-00000{i} could not be written: {reason}" for i in full_at]
        assert told1 == []
        assert list(losses(records(config.checkpoint.out))) == [1, 2, 3]
        assert losses(records(config.checkpoint.out), "save_error") == dict.fromkeys(full_at, reason)


def test_the_number_to_keep_is_checked():
    default = parse_arguments([]).checkpoint
    assert (default.keep, default.save_async) == (3, True)
    assert not parse_arguments(["--no-save-async"]).checkpoint.save_async
    assert parse_arguments(["--keep", "0"]).checkpoint.keep is None
    with pytest.raises(ValueError, match="--keep must be at least 1: got -1"):
        resolve(["--keep", "-1"])


# ---- Other divisions of the work ----


def follow(tmp_path, name, num_ranks, resume, reference, **changes):
    """Resume under another division; its losses are the uninterrupted run's."""
    run = run_ranks(num_ranks, train, settings(tmp_path / name, resume=str(resume), **changes))[0]
    first = int(resume.name.removeprefix("step-"))
    expected = {step: loss for step, loss in reference.items() if step > first}
    assert len(expected) == 20
    assert losses(run) == pytest.approx(expected, rel=1e-5), name


LONG = {"steps": 22, "seq_len": 16, "eval_sequences": 1}


def test_a_pipeline_resumes_with_more_and_fewer_ranks_and_other_schedules(tmp_path):
    whole = run_ranks(2, train, settings(tmp_path / "whole", save_every=2, keep=None, **LONG))[0]
    resume = tmp_path / "whole" / "checkpoints" / "step-000002"
    follow(tmp_path, "pp4", 4, resume, losses(whole), schedule="1f1b", **LONG)
    follow(tmp_path, "pp1", 1, resume, losses(whole), schedule="dualpipev", **LONG)


def test_experts_spread_over_ranks_and_gather_again(tmp_path):
    """Two data-parallel ranks throughout, so that steps take the same tokens; the experts move out and back."""
    long = {**LONG, "model": dataclasses.replace(MODEL, num_layers=2), "pp": 1, "micro_batches": 2, "keep": None}
    divisions = [{"ep": 1, "save_every": 2}, {"ep": 2, "save_every": 10}, {"ep": 1}]
    folder = "{}/{}/checkpoints/step-0000{}".format
    resumes = ["", folder(tmp_path, 0, "02"), folder(tmp_path, 1, 10)]
    configs = [
        settings(tmp_path / str(i), resume=resume, **long, **division)
        for i, (division, resume) in enumerate(zip(divisions, resumes, strict=True))
    ]
    whole, spread, back = (losses(run) for run in run_ranks(2, train_each, configs)[0])
    assert (len(spread), len(back)) == (20, 12)
    assert spread == pytest.approx({step: loss for step, loss in whole.items() if step > 2}, rel=1e-5)
    assert back == pytest.approx({step: loss for step, loss in whole.items() if step > 10}, rel=1e-5)
