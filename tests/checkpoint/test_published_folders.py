"""Folders of published models that are damaged or contradictory: an error of one line, never a partly loaded model."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_dualpipe.checkpoint.huggingface import PublishedModel, from_pretrained
from tests.support.mutations import check_message
from tests.support.published import random_model, save

SINGLE = "model.safetensors"
EXPERT = "model.layers.1.block_sparse_moe.experts.{}.w2.weight"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    base = tmp_path_factory.mktemp("published")
    save(random_model("mixtral"), base / "single")
    return base


@pytest.fixture
def single(sources, tmp_path):
    return shutil.copytree(sources / "single", tmp_path / "single")


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


@pytest.mark.parametrize("name,shape", [
    ("model.embed_tokens.weight", (36, 24)), ("model.layers.2.self_attn.k_proj.weight", (24, 24)),
    (EXPERT.format(3), (11, 24)), ("model.norm.weight", (24, 1)),
])  # fmt: skip
def test_wrong_shapes(single, name, shape):
    edit(single, lambda tensors: tensors.update({name: torch.zeros(shape)}))
    assert f"{name} has shape {[*shape]}, but by config.json it must have [" in refused(single)


def test_missing_and_surplus_experts_are_named(single):
    edit(single, lambda tensors: [tensors.pop(EXPERT.format(e)) for e in (1, 2)])
    lacks = "lacks tensors of the model that its config.json describes: "
    assert f"{lacks}{EXPERT.format(1)} (and 1 like it)" in refused(single)
    edit(single, lambda tensors: tensors.update({EXPERT.format(e): torch.zeros(24, 11) for e in (1, 2, 4)}))
    surplus = "has tensors that the model of its config.json does not have: "
    assert refused(single).endswith(surplus + EXPERT.format(4))


def test_a_whole_layer_more_or_less_than_the_config_says(single):
    config = json.loads((single / "config.json").read_text())
    for layers, found in ((2, "does not have: model.layers.2."), (4, "config.json describes: model.layers.3.")):
        (single / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
        assert found in refused(single)


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_other_files_are_read_before_the_weights(single, name, monkeypatch):
    (single / name).write_bytes(b'{"a": ')
    monkeypatch.setattr(PublishedModel, "read", lambda *_: pytest.fail("read a tensor"))
    with pytest.raises(ValueError, match=rf"cannot read .*{name}: "):
        from_pretrained(single)


def test_folders_without_a_config(single, tmp_path):
    (single / "config.json").unlink()
    missing = "FOLDER has no config.json: give the local folder of a published model (hf download)"
    assert refused(single) == missing
    (single / "config.json").write_text("[1]")
    assert refused(single) == "config.json must be an object: got [1]"
    assert refused(tmp_path / "nothing") == missing
