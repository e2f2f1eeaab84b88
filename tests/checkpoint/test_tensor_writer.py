"""Shards that the safetensors library and transformers read, without gathering a model in memory."""

import json
import os
import resource
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from moe_dualpipe.checkpoint.atomic_folder import new_folder
from moe_dualpipe.checkpoint.tensor_file import write_tensors
from moe_dualpipe.checkpoint.tensor_folder import TensorFolder
from moe_dualpipe.checkpoint.tensor_writer import Shards, parse_size
from tests.support.ranks import run_ranks
from tests.support.safetensors_files import every_dtype, same, tensor_of

INDEX = "model.safetensors.index.json"


def write(folder, tensors, *size):
    shards = Shards({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, *size)
    shards.write(folder, tensors.items())
    assert {path.name for path in folder.glob("*.safetensors")} == {*shards.files}
    return shards


def read_with_library(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("size", ["5GB", 100, 1])
def test_every_dtype_and_shape_is_read_as_written(tmp_path, size):
    tensors = every_dtype()
    write(tmp_path, tensors, size)
    folder = TensorFolder(tmp_path)
    assert all(same(folder.read(name), tensor) for name, tensor in tensors.items())
    assert all(entry.start % entry.dtype.itemsize == 0 for entry in folder.entries.values())
    found = read_with_library(tmp_path)
    assert found.keys() == tensors.keys() and all(same(found[name], tensor) for name, tensor in tensors.items())
    umask = os.umask(0)
    os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666 & ~umask}


def test_shards_equal_those_of_huggingface_hub(tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    tensors = {f"layers.{i}.up": tensor_of(torch.float32, 1 + 7 * i % 10) for i in range(23)}  # 4 to 40 bytes
    for size in (40, 60, "0.1KB"):
        theirs, ours = tmp_path / f"theirs-{size}", tmp_path / f"ours-{size}"
        theirs.mkdir()
        ours.mkdir()
        hub.save_torch_state_dict(tensors, theirs, max_shard_size=size)
        shards = write(ours, tensors, size)
        found = [json.loads((folder / INDEX).read_text()) for folder in (theirs, ours)]
        assert found[0]["weight_map"] == found[1]["weight_map"]
        assert found[0]["metadata"]["total_size"] == found[1]["metadata"]["total_size"]
        assert len(set(found[0]["weight_map"].values())) > 5 and shards.largest <= parse_size(size)


def test_a_tensor_larger_than_a_shard_is_alone(tmp_path):
    sizes = {"e": 3, "b": 50, "c": 4, "d": 6, "a": 1}
    shards = write(tmp_path, {name: tensor_of(torch.uint8, size) for name, size in sizes.items()}, 10)
    assert [*shards.files.values()] == [["e"], ["b"], ["c", "d"], ["a"]]
    assert [*shards.files][::3] == [f"model-0000{i}-of-00004.safetensors" for i in (1, 4)]
    assert json.loads((tmp_path / INDEX).read_text())["metadata"] == {"total_size": 64}


def test_views_are_written_as_they_look_and_unknown_dtypes_are_refused(tmp_path):
    base = torch.randn(4, 6, requires_grad=True)
    views = {"t": base.T, "s": base[1:3, ::2], "e": base[:1].expand(3, 6), "first": base[0], "second": base[1]}
    write_tensors(tmp_path / "model.safetensors", views)
    found = read_with_library(tmp_path)
    assert all(torch.equal(found[name], view) for name, view in views.items())
    for dtype in (torch.complex128, torch.float4_e2m1fn_x2):
        with pytest.raises(ValueError, match=f"a safetensors file cannot store {dtype} of 'a'"):
            write_tensors(tmp_path / "other", {"a": torch.empty(2, dtype=dtype)})
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "model.safetensors", views)


def test_sizes():
    texts = {"5GB": 5 * 10**9, "512MiB": 2**29, "1.5 kb": 1500, " 2TB ": 2 * 10**12, 7: 7}
    assert {text: parse_size(text) for text in texts} == texts
    for text in ("5", "GB", "-1GB", "0KB", 0, -3, "1e3KB", "5 gallons", "nanGB", "9" * 99 + "GB", 1.5, None):
        with pytest.raises(ValueError, match="a shard size is a number of bytes, or a text such as 5GB: got "):
            parse_size(text)
