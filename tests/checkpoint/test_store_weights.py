"""Weights on an S3 server: exports and published models are written there and read from there as in folders."""

import dataclasses

import pytest
import torch

from moe_dualpipe.checkpoint import find_checkpoint, open_model
from moe_dualpipe.checkpoint.huggingface import plan_checkpoint_export
from moe_dualpipe.checkpoint.tensor_folder import TensorFolder
from moe_dualpipe.cli import main
from moe_dualpipe.data.stores import Url, local_path, open_folder, staged_folder
from tests.support.object_store import access, in_environment
from tests.support.ranks import run_failing_ranks, run_ranks
from tests.support.runs import MODEL, make_trainer, settings, train

PLAIN = dataclasses.replace(MODEL, num_shared_experts=0, num_dense_layers=0)
RUN, GIVEN, PUBLISHED = "s3://bucket/run", "s3://bucket/given", "s3://bucket/published"
SHARDS = "100KB"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A run of two ranks, and its exports in both formats, in local folders."""
    base = tmp_path_factory.mktemp("weights")
    run_ranks(2, train, settings(base / "run", model=PLAIN, steps=1))
    assert main(["export", str(base / "run"), "--out", str(base / "given")]) == 0
    published = ["--to", "huggingface", "--max-shard-size", SHARDS]
    assert main(["export", str(base / "run"), "--out", str(base / "published"), *published]) == 0
    return base


@pytest.fixture
def run(folders, s3):
    s3.put_folder(folders / "run", "run")
    s3.requests.clear()
    return s3


def equal_to(folder, s3, key):
    names = [path.name for path in sorted(folder.iterdir())]
    return s3.names(f"{key}/") == [f"{key}/{name}" for name in names] and all(
        s3.content(f"{key}/{name}") == (folder / name).read_bytes() for name in names
    )


def test_an_export_to_a_url_has_the_same_files_and_ends_with_config_json(folders, run, capsys):
    assert main(["export", RUN, "--out", GIVEN]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{RUN}/checkpoints/step-000001 -> {GIVEN}: 0.0")
    assert equal_to(folders / "given", run, "given") and run.written()[-1] == "config.json"
    assert main(["export", RUN, "--out", GIVEN]) == 2
    assert capsys.readouterr().err == f"moe-dualpipe: error: {GIVEN} already exists: choose another folder\n"


def test_exported_weights_are_loaded_from_a_url_and_their_checksums_compared(folders, s3):
    s3.put_folder(folders / "given", "given")
    (local, _), (model, _) = open_model(str(folders / "given")), open_model(GIVEN)
    for (name, tensor), other in zip(local.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(tensor, other), name
    data = s3.content("given/model.safetensors")
    s3.put("given/model.safetensors", data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    with pytest.raises(ValueError, match=r"model.safetensors does not match its checksum"):
        open_model(GIVEN)


def validation_loss(rank, config):
    return make_trainer(rank, config).validation_loss()


@pytest.mark.parametrize("kind", ["given", "published"])
@pytest.mark.long
def test_a_run_starts_from_weights_at_a_url(folders, s3, tmp_path, kind):
    s3.put_folder(folders / kind, kind)
    config = settings(tmp_path / "run", model=PLAIN, weights=str(folders / kind))
    expected = run_ranks(2, validation_loss, config)
    config = settings(tmp_path / "run", model=PLAIN, weights=f"s3://bucket/{kind}")
    assert run_ranks(2, in_environment, access(s3), validation_loss, config) == expected


def export_published(_rank):
    plan_checkpoint_export(find_checkpoint(RUN)).write(staged_folder(Url(PUBLISHED)), SHARDS)
    torch.distributed.barrier()
    return [*staged_folder(Url(PUBLISHED)).parent.glob(".*rank*")]


def test_ranks_export_shards_to_a_url_and_config_json_last(folders, run):
    assert run_ranks(2, in_environment, access(run), export_published) == [[], []]
    assert equal_to(folders / "published", run, "published")
    assert run.written()[-1] == "config.json" and len(run.written()) > 6


@pytest.mark.long
def test_an_export_that_fails_on_one_rank_is_not_complete(run):
    run.fault = lambda request: 403 if request.method == "PUT" and "model-00002" in request.path else None
    errors = run_failing_ranks(2, in_environment, access(run), export_published)
    assert all("access denied" in error for error in errors)
    assert "published/config.json" not in run.names()


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


@pytest.mark.usefixtures("run")
@pytest.mark.long
def test_commands_read_runs_at_a_url_as_in_a_folder(folders, capsys):
    def output(*arguments):
        code = main([*arguments])
        captured = capsys.readouterr()
        return code, (captured.out + captured.err).replace(RUN, str(folders / "run"))

    local = str(folders / "run")
    for words in (("generate", "--sample-tokens", "5"), ("eval", "--data", __file__, "--max-tokens", "200", "--json")):
        command, *options = words
        one, other = output(command, local, *options), output(command, RUN, *options)
        assert one[0] == other[0] == 0 and one[1].split('"tokens_per')[0] == other[1].split('"tokens_per')[0]
    model = str(folders / "published")
    plan = *["plan", "estimate", "--gpu", "l4", "--gpus", "2", "--ep", "2", "--model"], model, "--loads"
    assert output(*plan, RUN) == output(*plan, local) and output(*plan, local)[0] == 0
    assert output("generate", "s3://bucket/none")[1].startswith(
        "moe-dualpipe: error: no checkpoint in s3://bucket/none"
    )
