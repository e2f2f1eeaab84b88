"""Runs whose folder is a URL compute and keep the same as runs in a local folder."""

import pytest
import torch

from moe_dualpipe.checkpoint import find_checkpoint, list_checkpoints
from moe_dualpipe.data.stores import Url, local_path, read, url_of
from moe_dualpipe.training.loop import train_loop
from moe_dualpipe.training.metrics import read_records
from moe_dualpipe.training.setup import run_folder
from tests.support.checkpoints import tensors_of
from tests.support.object_store import access, in_environment
from tests.support.ranks import run_ranks
from tests.support.runs import change, losses, make_trainer, settings

URL = "s3://bucket/run"


def train(rank, config, stop=None):
    """Like `runs.train`, also for a URL. stop: after this step."""
    callback = lambda trainer, record: record["step"] == stop and trainer.request_stop()  # noqa: E731
    train_loop(make_trainer(rank, config), callbacks=[callback])


def equal_states(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def on_a_store(rank, folder):
    """A run on a store, resumed in its middle and compared with a local one."""
    local, url = settings(folder / "local", steps=4, save_every=2), URL
    remote = change(local, out=url, staging=str(folder / "staging"))
    train(rank, local)
    train(rank, remote, stop=2)
    assert not [path for path in (folder / "staging").rglob("*") if path.name.endswith(".safetensors")]
    train(rank, change(remote, out=None, resume=url, keep=1))
    names = [path.name for path in list_checkpoints(local_path(url) / "checkpoints")]
    (folder / "copy").mkdir()
    (folder / "copy" / "metrics.jsonl").write_bytes(read(Url(url) / "metrics.jsonl"))
    found, expected = find_checkpoint(url), find_checkpoint(str(folder / "local"))
    return names, equal_states(tensors_of(found), tensors_of(expected)), (found / "run.json").read_bytes()


def test_a_resumed_run_on_a_store_equals_one_in_a_folder(s3, tmp_path):
    names, equal, manifest = run_ranks(1, in_environment, access(s3), on_a_store, tmp_path)[0]
    assert names == ["step-000004"] and equal
    local, remote = read_records(tmp_path / "local"), read_records(tmp_path / "copy")
    assert losses(local) == losses(remote) and list(losses(remote)) == [1, 2, 3, 4]
    assert losses(local, "validation_loss")[4] == losses(remote, "validation_loss")[4]
    assert b'"step": 4' in manifest


@pytest.mark.parametrize("resume", [URL, f"{URL}/checkpoints", f"{URL}/checkpoints/step-000003"])
@pytest.mark.usefixtures("s3")
def test_the_folder_of_a_resumed_run_is_that_of_the_old_one(resume, tmp_path):
    config = change(settings(tmp_path), out=None, resume=resume)
    assert str(url_of(run_folder(config.checkpoint, config.name))) == URL
    other = change(config, out=str(tmp_path / "local"))
    assert run_folder(other.checkpoint, other.name) == tmp_path / "local"
