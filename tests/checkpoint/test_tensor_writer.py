"""TensorWriter writes files that the safetensors library and transformers read, without gathering them in memory."""

import json
import os
import resource
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moe_dualpipe.checkpoint.atomic_folder import new_folder
from moe_dualpipe.checkpoint.tensor_folder import TensorFolder
from moe_dualpipe.checkpoint.tensor_writer import TensorWriter, parse_size
from moe_dualpipe.data import synced_files
from tests.support.ranks import run_ranks
from tests.support.safetensors_files import every_dtype, same, tensor_of

INDEX = "model.safetensors.index.json"


def specs(tensors):
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def write(folder, tensors, *size):
    writer = TensorWriter(folder, specs(tensors), *size)
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.close()
    assert {file.path: file.size for file in writer.files} == {
        path: os.path.getsize(path) for path in folder.glob("*.safetensors")
    }
    return writer


def read_with_library(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("size", ["5GB", 100, 1])
def test_the_library_reads_every_dtype_and_shape(tmp_path, size):
    tensors = every_dtype()
    write(tmp_path, tensors, size)
    found = read_with_library(tmp_path)
    assert found.keys() == tensors.keys()
    assert all(same(found[name], tensor) for name, tensor in tensors.items())
    folder = TensorFolder(tmp_path)
    assert all(same(folder.read(name), tensor) for name, tensor in tensors.items())
    assert all(entry.start % entry.dtype.itemsize == 0 for entry in folder.entries.values())


def test_bytes_equal_those_of_the_library(tmp_path):
    """If names are sorted and all elements have one size: then there is only one way to write the file."""
    tensors = {name: tensor_of(torch.bfloat16, 3, 5 + i) for i, name in enumerate(["a.0", "a.10", "a.2", "ü", "中"])}
    write(tmp_path, tensors)
    save_file(tensors, tmp_path / "library", metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "library").read_bytes()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["library", "model.safetensors"]


def test_shards_equal_those_of_huggingface_hub(tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    tensors = {f"layers.{i}.up": tensor_of(torch.float32, 1 + 7 * i % 10) for i in range(23)}  # 4 to 40 bytes
    for size in (40, 60, "0.1KB"):
        theirs, ours = tmp_path / f"theirs-{size}", tmp_path / f"ours-{size}"
        theirs.mkdir()
        ours.mkdir()
        hub.save_torch_state_dict(tensors, theirs, max_shard_size=size)
        write(ours, tensors, size)
        found = [json.loads((folder / INDEX).read_text()) for folder in (theirs, ours)]
        assert found[0]["weight_map"] == found[1]["weight_map"]
        assert found[0]["metadata"]["total_size"] == found[1]["metadata"]["total_size"]
        assert len(set(found[0]["weight_map"].values())) > 5


def test_transformers_loads_shards(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    config.save_pretrained(tmp_path)
    assert len(write(tmp_path, model.state_dict(), "5KB").files) > 3
    loaded = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(same(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_a_tensor_larger_than_a_shard_is_alone(tmp_path):
    sizes = {"e": 3, "b": 50, "c": 4, "d": 6, "a": 1}
    tensors = {name: tensor_of(torch.uint8, size) for name, size in sizes.items()}
    writer = write(tmp_path, tensors, 10)
    assert [file.names for file in writer.files] == [["e"], ["b"], ["c", "d"], ["a"]]
    assert [file.path.name for file in writer.files][::3] == [f"model-0000{i}-of-00004.safetensors" for i in (1, 4)]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": 64}
    assert [*index["weight_map"]] == sorted(sizes)


def test_only_tensors_as_planned_are_written(tmp_path):
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}
    writer = TensorWriter(tmp_path, specs(tensors))
    for name, tensor, problem in [
        ("b", tensors["b"], "the next tensor is 'a', not 'b'"),
        ("a", torch.zeros(3, 2), r"'a' was planned as torch.float32 \[2, 3\]: got torch.float32 \[3, 2\]"),
        ("a", torch.zeros(2, 3).half(), r"'a' was planned as torch.float32 \[2, 3\]: got torch.float16 \[2, 3\]"),
    ]:
        with pytest.raises(ValueError, match=problem):
            writer.write(name, tensor)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ValueError, match="2 planned tensors were not written, the first is 'a'"):
        writer.close()
    writer.write("a", tensors["a"])
    with pytest.raises(ValueError, match="1 planned tensors were not written, the first is 'b'"):
        writer.close()
    writer.write("b", tensors["b"])
    with pytest.raises(ValueError, match="all planned tensors were written: got 'a'"):
        writer.write("a", tensors["a"])
    writer.close()
    assert same(read_with_library(tmp_path)["b"], tensors["b"])


def test_views_are_written_as_they_look(tmp_path):
    base = torch.randn(4, 6, requires_grad=True)
    complex_ = torch.randn(3, dtype=torch.complex64)
    views = {
        "t": base.T,
        "s": base[1:3, ::2],
        "e": base[:1].expand(3, 6),
        "c": complex_.conj(),
        "n": torch._neg_view(torch.ones(3)),
    }
    write(tmp_path, views)
    found = read_with_library(tmp_path)
    assert all(torch.equal(found[name], view) for name, view in views.items())


def test_plans_that_cannot_be_written(tmp_path):
    for tensors, problem in [
        ({}, "no tensors to write"),
        ({"a": (torch.complex128, (2,))}, "cannot store torch.complex128 of 'a'"),
        ({"a": (torch.float4_e2m1fn_x2, (2,))}, "cannot store torch.float4_e2m1fn_x2 of 'a'"),
        ({"__metadata__": (torch.int8, (2,))}, "cannot have a tensor named '__metadata__'"),
        ({"a": (torch.int8, (-2,))}, "'a': -2 is not a valid count"),
    ]:
        with pytest.raises(ValueError, match=problem):
            TensorWriter(tmp_path, tensors)
    assert not [*tmp_path.iterdir()]


def test_sizes():
    texts = {"5GB": 5 * 10**9, "512MiB": 2**29, "1.5 kb": 1500, " 2TB ": 2 * 10**12, 7: 7}
    assert {text: parse_size(text) for text in texts} == texts
    for text in ("5", "GB", "-1GB", "0KB", 0, -3, "1e3KB", "5 gallons", "nanGB", "9" * 99 + "GB", 1.5, None):
        with pytest.raises(ValueError, match="a shard size is a number of bytes, or a text such as 5GB: got "):
            parse_size(text)


def test_existing_files_stay(tmp_path):
    write(tmp_path, {"a": torch.ones(3)})
    writer = TensorWriter(tmp_path, {"a": (torch.float32, (3,))})
    with pytest.raises(FileExistsError):
        writer.write("a", torch.zeros(3))
    assert same(read_with_library(tmp_path)["a"], torch.ones(3))


def test_files_are_written_in_pieces_and_synced(tmp_path, monkeypatch):
    synced, fsync, os_write = [], os.fsync, os.write
    monkeypatch.setattr(synced_files, "PIECE", 1000)
    monkeypatch.setattr(synced_files, "SYNC", 4000)
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")) or fsync(file))
    monkeypatch.setattr(os, "write", lambda file, data: os_write(file, data[:999]))
    tensors = {"a": tensor_of(torch.uint8, 10_000), "b": tensor_of(torch.uint8, 100)}
    write(tmp_path, tensors, 10_000)
    assert all(same(read_with_library(tmp_path)[name], tensor) for name, tensor in tensors.items())
    names = [os.path.basename(path) for path in synced]
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert names == [first] * 3 + [second, INDEX, tmp_path.name]


def write_on_full_disk(_rank, folder):
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))  # bytes of a file
    try:
        with new_folder(folder) as unfinished:
            write(unfinished, {"a": torch.ones(1000), "b": torch.ones(5000)}, 4000)
    except OSError as error:
        return error.strerror, os.path.basename(error.filename)


def test_a_full_disk_leaves_nothing_and_the_file_is_named(tmp_path):
    [error] = run_ranks(1, write_on_full_disk, tmp_path / "out")
    assert error == ("File too large", "model-00002-of-00002.safetensors")
    assert not [*tmp_path.iterdir()]


WRITE_ALL = """
import resource, sys
from pathlib import Path
import torch
from moe_dualpipe.checkpoint.tensor_writer import TensorWriter
names = [str(i) for i in range(12)]
writer = TensorWriter(Path(sys.argv[1]), {name: (torch.float32, (4, 2**20)) for name in names}, int(sys.argv[2]))
torch.ones(1).contiguous()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name in names:
    writer.write(name, torch.full((4, 2**20), float(name)))
writer.close()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, len(writer.files))
"""


@pytest.mark.long
@pytest.mark.parametrize("limit,files", [(2**30, 1), (2**26, 3)])
def test_peak_is_that_of_one_tensor(tmp_path, limit, files):
    command = [sys.executable, "-c", WRITE_ALL, str(tmp_path), str(limit)]  # 12 tensors of 16 MiB
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    kib, number = map(int, out.split())
    assert number == files
    assert kib < 40 * 1024
    folder = TensorFolder(tmp_path)
    assert all((folder.read(str(i), 3) == i).all() for i in range(12))
