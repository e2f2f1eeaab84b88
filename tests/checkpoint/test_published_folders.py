"""Folders of published models that are damaged or contradictory: an error of one line, never a partly loaded model."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_dualpipe.checkpoint.huggingface import PublishedModel, from_pretrained
from tests.support.mutations import check_message
from tests.support.published import random_model, save

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
EXPERT = "model.layers.1.block_sparse_moe.experts.{}.w2.weight"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    base = tmp_path_factory.mktemp("published")
    save(random_model("mixtral"), base / "single")
    save(random_model("mixtral"), base / "shards", max_shard_size="10KB")
    return base


@pytest.fixture
def single(sources, tmp_path):
    return shutil.copytree(sources / "single", tmp_path / "single")


@pytest.fixture
def shards(sources, tmp_path):
    return shutil.copytree(sources / "shards", tmp_path / "shards")


def refused(folder):
    """The message of `from_pretrained`, without the path of the folder."""
    messages = []
    for load in (PublishedModel, from_pretrained):
        with pytest.raises(ValueError) as error:
            load(folder)
        check_message(error.value)
        assert str(folder) in str(error.value)
        messages.append(str(error.value).replace(f"{folder}/", "").replace(str(folder), "FOLDER"))
    assert messages[0] == messages[1]
    return messages[0]


def edit(folder, change):
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_truncated_files(single, shards):
    shard = sorted(shards.glob("model-*"))[2]
    for folder, file in ((single, single / SINGLE), (shards, shard)):
        data = file.read_bytes()
        for size in (0, 5, 100, len(data) // 2, len(data) - 1):
            file.write_bytes(data[:size])
            assert file.name in refused(folder)
        file.write_bytes(data)
        PublishedModel(folder)


def test_indices_that_name_missing_files_or_leave_the_folder(shards, tmp_path):
    name = "model.norm.weight"
    edit_index(shards, lambda listed: listed.update({name: "model-00099-of-00099.safetensors"}))
    assert "it lists model-00099-of-00099.safetensors, not found: download or copy" in refused(shards)
    shutil.copy(sorted(shards.glob("model-*"))[0], tmp_path / "outside.safetensors")
    for path in ("../outside.safetensors", str(tmp_path / "outside.safetensors"), "..", "a/b.safetensors"):
        edit_index(shards, lambda listed, path=path: listed.update({name: path}))
        message = refused(shards)
        assert message.startswith(f"cannot read {INDEX}: {path[:10]!r}"[:-1])
        assert message.endswith(" is not a valid file name")


def test_a_tensor_in_two_shards(shards):
    first, second, *_ = sorted(shards.glob("model-*"))
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: tensor}, second)
    assert f"lists {name!r} in {first.name!r}, but {second.name} has it" in refused(shards)


@pytest.mark.parametrize("name,shape", [
    ("model.embed_tokens.weight", (36, 24)), ("model.layers.2.self_attn.k_proj.weight", (24, 24)),
    (EXPERT.format(3), (11, 24)), ("model.norm.weight", (24, 1)),
])  # fmt: skip
def test_wrong_shapes(single, name, shape):
    edit(single, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    assert f"{name} has shape {[*shape]}, but by config.json it must have [" in refused(single)


def test_weights_that_are_not_numbers_for_weights(single):
    edit(single, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(24, dtype=torch.int64)}))
    assert "model.norm.weight has dtype torch.int64, which is not for weights" in refused(single)
    quantized = {"model.norm.weight": torch.zeros(24), EXPERT.format(0): torch.zeros(24, 11).to(torch.float8_e4m3fn)}
    edit(single, lambda tensors: tensors.update(quantized))
    assert "needs a quantization_config of 'fp8'" in refused(single)


def test_missing_and_surplus_experts_are_listed(single):
    edit(single, lambda tensors: [tensors.pop(EXPERT.format(e)) for e in (1, 2)])
    message = refused(single)
    assert "lacks tensors of the model that its config.json describes" in message
    assert "model.layers.1.block_sparse_moe.experts.1-2.w2.weight (2 tensors)" in message
    edit(single, lambda tensors: tensors.update({EXPERT.format(e): torch.zeros(24, 11) for e in (1, 2, 4)}))
    message = refused(single)
    assert "has tensors that the model of its config.json does not have" in message
    assert "model.layers.1.block_sparse_moe.experts.4.w2.weight (1 tensor)" in message


def test_a_whole_layer_more_or_less_than_the_config_says(single):
    config = json.loads((single / "config.json").read_text())
    for layers, found in ((2, "does not have: model.layers.2."), (4, "config.json describes: model.layers.3.")):
        (single / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
        assert found in refused(single)


def test_pickles_are_refused_and_not_opened(single):
    (single / SINGLE).unlink()
    (single / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch bad'\ntR.")
    assert "holds weights as pickles, which can run code (pytorch_model.bin): convert them" in refused(single)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_other_files_are_read_before_the_weights(single, name, monkeypatch):
    (single / name).write_bytes(b'{"a": ')
    monkeypatch.setattr(PublishedModel, "read", lambda *_: pytest.fail("read a tensor"))
    with pytest.raises(ValueError, match=rf"cannot read .*{name}: Expecting value"):
        from_pretrained(single)


def test_folders_without_a_config(single, tmp_path):
    (single / "config.json").unlink()
    missing = "FOLDER has no config.json: give the local folder of a published model (hf download)"
    assert refused(single) == missing
    (single / "config.json").write_text("[1]")
    assert refused(single) == "config.json must be an object: got [1]"
    assert refused(tmp_path / "nothing") == missing
