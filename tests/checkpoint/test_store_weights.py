"""Weights on an S3 server: exports and published models are written there and read from there as in folders."""

import dataclasses

import pytest
import torch

from moe_dualpipe.checkpoint import find_checkpoint
from moe_dualpipe.checkpoint.atomic_folder import FolderInUseError, hidden, only_writer
from moe_dualpipe.checkpoint.huggingface import plan_checkpoint_export
from moe_dualpipe.checkpoint.tensor_file import TensorFolder
from moe_dualpipe.cli import main
from moe_dualpipe.data.stores import Url, local_path, open_folder, staged_folder
from tests.support.object_store import access, in_environment
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, make_trainer, settings, train

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


def validation_loss(rank, config):
    return make_trainer(rank, config).validation_loss()


@pytest.mark.parametrize("kind", ["run", "published"])
@pytest.mark.long
def test_a_run_starts_from_weights_at_a_url(folders, s3, tmp_path, kind):
    s3.put_folder(folders / kind, kind)
    config = settings(tmp_path / "new", model=PLAIN, weights=str(folders / kind))
    expected = run_ranks(2, validation_loss, config)
    config = settings(tmp_path / "new", model=PLAIN, weights=f"s3://bucket/{kind}")
    assert run_ranks(2, in_environment, access(s3), validation_loss, config) == expected


def export_published(_rank):
    plan_checkpoint_export(find_checkpoint(RUN)).write(staged_folder(Url(PUBLISHED)), SHARDS)
    torch.distributed.barrier()
    return [*staged_folder(Url(PUBLISHED)).parent.glob(".*rank*")]


def test_ranks_export_the_same_files_to_a_url_and_config_json_last(folders, s3, capsys):
    s3.put_folder(folders / "run", "run")
    s3.requests.clear()
    assert run_ranks(2, in_environment, access(s3), export_published) == [[], []]
    names = sorted(path.name for path in (folders / "published").iterdir())
    assert s3.names("published/") == [f"published/{name}" for name in names]
    assert all(s3.content(f"published/{name}") == (folders / "published" / name).read_bytes() for name in names)
    assert s3.written()[-1] == "config.json" and len(s3.written()) > 6
    place = staged_folder(Url(PUBLISHED))
    with (
        only_writer(place, hidden(place, "lock")),
        pytest.raises(FolderInUseError, match=f"^{PUBLISHED} is being written"),
    ):
        plan_checkpoint_export(find_checkpoint(RUN)).write(place)
    assert main(["export", RUN, "--out", PUBLISHED]) == 2
    assert capsys.readouterr().err == f"moe-dualpipe: error: {PUBLISHED} already exists: choose another folder\n"


def test_tensors_of_a_published_model_are_read_by_ranges(folders, s3):
    s3.put_folder(folders / "published", "published")
    folder = local_path(PUBLISHED)
    open_folder(folder)
    s3.bytes_read = 0
    remote, local = TensorFolder(folder), TensorFolder(folders / "published")
    headers = s3.bytes_read
    name = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
    assert torch.equal(remote.read(name), local.read(name))
    assert s3.bytes_read - headers == local.entries[name].nbytes
    assert headers < sum(path.stat().st_size for path in (folders / "published").iterdir()) / 4
    for name in local.entries:
        assert torch.equal(remote.read(name), local.read(name)), name
    assert not [*folder.glob("*.safetensors")]
