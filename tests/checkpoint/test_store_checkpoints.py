"""Checkpoints and weights on an S3 server: the same contents as in a folder, never visible before they are complete."""

import dataclasses
import threading

import pytest
import torch

from moe_dualpipe.checkpoint import (
    SaveError,
    find_checkpoint,
    find_weights,
    global_weights,
    list_checkpoints,
    load_checkpoint,
    load_weights,
    save_checkpoint,
)
from moe_dualpipe.checkpoint.destinations import hidden, is_there
from moe_dualpipe.checkpoint.huggingface import from_pretrained, plan_checkpoint_export
from moe_dualpipe.cli import main
from moe_dualpipe.data.files import FolderInUseError, only_writer
from moe_dualpipe.data.stores import Patience, Url, local_path, output_folder, read, url_of
from moe_dualpipe.health.watch import watch_ranks
from moe_dualpipe.messages import printable
from moe_dualpipe.models import ModelConfig
from moe_dualpipe.training.console import RunFailed
from moe_dualpipe.training.loop import train_loop
from moe_dualpipe.training.metrics import read_records
from moe_dualpipe.training.resolve import run_folder
from moe_dualpipe.training.step import Trainer
from tests.support.checkpoints import loaded_step, state_of, tensors_of
from tests.support.object_store import BUCKET, access, in_environment
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, change, equal_tensors, losses, make_run, make_trainer, settings, train

RUN = "s3://bucket/run"


def save_steps(rank, steps, keep=0, patience=20.0):
    run = output_folder(RUN)
    for step in steps:
        extra = {"tokens.txt": b"a b c"}
        save_checkpoint(run, step, state_of(rank, step), ModelConfig(), extra, keep, patience=Patience(patience))
    assert not [*run.rglob("*.safetensors")], "local files stay after the upload"
    return [path.name for path in list_checkpoints(run / "checkpoints")]


def save(s3, steps, **options):
    return run_ranks(2, in_environment, access(s3), save_steps, steps, *options.values())[0]


@pytest.fixture(scope="module")
def three_steps(s3_server):
    """The files of a run with checkpoints after 3, 5 and 9 steps, and the requests that wrote them."""
    s3_server.reset()
    names = save(s3_server, [3, 5, 9])
    assert names == ["step-000009", "step-000005", "step-000003"]
    return {name: s3_server.content(name) for name in s3_server.names()}, [*s3_server.requests]


@pytest.fixture
def run(three_steps, s3):
    """The same files again, for a test to damage."""
    for name, data in three_steps[0].items():
        s3.put(name, data)
    s3.requests.clear()
    return s3


def test_a_rank_copies_only_the_files_that_it_needs(run):
    found = find_checkpoint(f"{RUN}/checkpoints")
    assert printable(found) == f"{RUN}/checkpoints/step-000009" and (found / "tokens.txt").read_bytes() == b"a b c"
    state = {name: torch.full_like(tensor, -1) for name, tensor in state_of(1, 0).items() if name != "both"}
    run.bytes_read = 0
    load_checkpoint(found, state)
    assert all(torch.equal(state[name], state_of(1, 9)[name]) for name in state)
    key = "run/checkpoints/step-000009/rank-{}-0.safetensors"
    mine, other = (len(run.content(key.format(rank))) for rank in (1, 0))
    headers = sum(8 + int.from_bytes(run.content(key.format(rank))[:8], "little") for rank in (0, 1))
    assert run.bytes_read == mine + headers < mine + other + headers


def test_run_json_is_written_last_and_removed_first(three_steps, s3):
    writes = [r.path for r in three_steps[1] if r.method == "PUT" and "step-000009" in r.path]
    assert len(writes) == 4 and writes[-1].endswith("/run.json")
    for name, data in three_steps[0].items():
        s3.put(name, data)
    s3.requests.clear()
    assert save(s3, [9], keep=1) == ["step-000009"]  # again, and the others are removed
    deletes = [key.removeprefix("run/checkpoints/") for request in s3.requests for key in request.deleted]
    assert deletes[0] == "step-000009/run.json"
    for step in ("step-000003", "step-000005"):
        assert next(path for path in deletes if path.startswith(step)) == f"{step}/run.json"
    assert {name.split("/")[2] for name in s3.names()} == {"step-000009"}
    assert loaded_step(find_checkpoint(RUN)) == 9


def test_a_damaged_checkpoint_is_not_loaded(run):
    """A changed byte of a large file is found while it is loaded, the others before."""
    folder = "run/checkpoints/step-000009"
    key = f"{folder}/rank-0-0.safetensors"
    data = run.content(key)
    run.put(key, data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    with pytest.raises(ValueError, match=r"rank-0-0.safetensors does not match its checksum"):
        loaded_step(find_checkpoint(RUN))
    run.put(key, data[:-1])
    assert find_checkpoint(RUN, [].append).name == "step-000005"
    for missing in ("rank-1-0.safetensors", "run.json"):
        run.client.delete_object(Bucket=BUCKET, Key=f"{folder}/{missing}")
        assert loaded_step(find_checkpoint(RUN, (warnings := []).append)) == 5
        assert len(warnings) == (missing != "run.json")


def fail_to_save(rank):
    run = output_folder(RUN)
    with pytest.raises(SaveError, match=r"^rank 1: s3://bucket/run/checkpoints/.*/rank-1-0.safetensors: access denied"):
        save_checkpoint(run, 20, state_of(rank, 20), ModelConfig(), keep=1)
    assert not [*run.rglob(".step-*")]


def test_an_upload_that_fails_on_one_rank_fails_the_save_on_all(run):
    run.fault = lambda request: 403 if request.method == "PUT" and "rank-1-0" in request.path else None
    run_ranks(2, in_environment, access(run), fail_to_save)
    run.reset_faults()
    assert find_checkpoint(RUN).name == "step-000009"
    assert save(run, [21], keep=1) == ["step-000021"]
    assert {name.split("/")[2] for name in run.names()} == {"step-000021"}, "a remnant stays"


PLAIN = dataclasses.replace(MODEL, num_shared_experts=0, num_dense_layers=0)
RUN, PUBLISHED = "s3://bucket/run", "s3://bucket/published"
SHARDS = "100KB"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A run of two ranks, and its export, in local folders."""
    base = tmp_path_factory.mktemp("weights")
    run_ranks(2, train, settings(base / "run", model=PLAIN, steps=1))
    assert main(["export", str(base / "run"), "--out", str(base / "published"), "--max-shard-size", SHARDS]) == 0
    return base


def export_published(_rank):
    plan_checkpoint_export(find_checkpoint(RUN)).write(output_folder(PUBLISHED), SHARDS)
    torch.distributed.barrier()
    return [*output_folder(PUBLISHED).parent.glob(".*rank*")]


def test_ranks_export_the_same_files_to_a_url_and_config_json_last(folders, s3, capsys):
    s3.put_folder(folders / "run", "run")
    s3.requests.clear()
    assert run_ranks(2, in_environment, access(s3), export_published) == [[], []]
    names = sorted(path.name for path in (folders / "published").iterdir())
    assert s3.names("published/") == [f"published/{name}" for name in names]
    assert all(s3.content(f"published/{name}") == (folders / "published" / name).read_bytes() for name in names)
    assert s3.written()[-1] == "config.json" and len(s3.written()) > 6
    place = output_folder(PUBLISHED)
    with (
        only_writer(place, hidden(place, "lock")),
        pytest.raises(FolderInUseError, match=f"^{PUBLISHED} is being written"),
    ):
        plan_checkpoint_export(find_checkpoint(RUN)).write(place)
    assert main(["export", RUN, "--out", PUBLISHED]) == 2
    assert capsys.readouterr().err == f"moe-dualpipe: error: {PUBLISHED} already exists: choose another folder\n"
    s3.put("adapter/adapter_config.json", b"{}")
    assert is_there(output_folder("s3://bucket/adapter")) and not is_there(output_folder("s3://bucket/nothing"))


def test_files_of_a_published_model_are_copied_while_it_is_loaded(folders, s3):
    s3.put_folder(folders / "published", "published")
    folder, expected = find_weights(PUBLISHED), global_weights(from_pretrained(folders / "published"))
    state = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in expected.items()}
    load_weights(folder, state)
    assert all(torch.equal(state[f"model.{name}"], tensor) for name, tensor in expected.items())
    assert not [*folder.glob("*.safetensors")], "copies stay after they were loaded"


# ---- Runs whose folder is a RUN compute and keep the same as runs in a local folder ----


def run_until(rank, config, stop=None):
    """Like `runs.train`, also for a RUN. stop: after this step."""
    callback = lambda trainer, record: record["step"] == stop and trainer.request_stop()  # noqa: E731
    train_loop(make_trainer(rank, config), callbacks=[callback])


def on_a_store(rank, folder):
    """A run on a store, resumed in its middle and compared with a local one."""
    local, url = settings(folder / "local", steps=4, save_every=2), RUN
    remote = change(local, out=url, staging=str(folder / "staging"))
    run_until(rank, local)
    run_until(rank, remote, stop=2)
    assert not [path for path in (folder / "staging").rglob("*") if path.name.endswith(".safetensors")]
    run_until(rank, change(remote, out=None, resume=url, keep=1))
    names = [path.name for path in list_checkpoints(local_path(url) / "checkpoints")]
    (folder / "copy").mkdir()
    (folder / "copy" / "metrics.jsonl").write_bytes(read(Url(url) / "metrics.jsonl"))
    found, expected = find_checkpoint(url), find_checkpoint(str(folder / "local"))
    return names, equal_tensors(tensors_of(found), tensors_of(expected)), (found / "run.json").read_bytes()


def test_a_resumed_run_on_a_store_equals_one_in_a_folder(s3, tmp_path):
    names, equal, manifest = run_ranks(1, in_environment, access(s3), on_a_store, tmp_path)[0]
    assert names == ["step-000004"] and equal
    local, remote = read_records(tmp_path / "local"), read_records(tmp_path / "copy")
    assert losses(local) == losses(remote) and list(losses(remote)) == [1, 2, 3, 4]
    assert losses(local, "validation_loss")[4] == losses(remote, "validation_loss")[4]
    assert b'"step": 4' in manifest


def until_the_last_save_fails(rank, folder):
    config = change(
        settings(folder), out=RUN, staging=str(folder / "staging"), steps=4, save_every=2, keep=1, timeout=8.0
    )
    with pytest.raises(RunFailed) as ended, watch_ranks(config.health.timeout) as progress:
        train_loop(Trainer(make_run(config, rank, 2), progress))
    return ended.value.text


@pytest.mark.parametrize("first", ["step-000004/rank-1-0", "?delete", "list-type", "metrics.jsonl"])
@pytest.mark.quick("list-type")
def test_if_a_store_stops_answering_all_ranks_train_to_the_end_and_say_why(s3, tmp_path, first):
    """Whatever is asked for when it stops."""
    stopped, end = threading.Event(), threading.Event()

    def wait(request):
        if stopped.is_set() or (first in request.path and "step-000002" in "".join(s3.names("run"))):
            stopped.set()
            end.wait(100)

    s3.fault = wait
    try:
        one, other = run_ranks(2, in_environment, access(s3), until_the_last_save_fails, tmp_path, timeout=60)
    finally:
        end.set()
    assert one == other and one.startswith(f"{RUN}/checkpoints/step-000004 could not be written: ")
    assert stopped.is_set()


@pytest.mark.parametrize("resume", [RUN, f"{RUN}/checkpoints", f"{RUN}/checkpoints/step-000003"])
@pytest.mark.usefixtures("s3")
def test_the_folder_of_a_resumed_run_is_that_of_the_old_one(resume, tmp_path):
    config = change(settings(tmp_path), out=None, resume=resume)
    assert str(url_of(run_folder(config.checkpoint, config.name))) == RUN
    other = change(config, out=str(tmp_path / "local"))
    assert run_folder(other.checkpoint, other.name) == tmp_path / "local"
