"""TensorFolder reads what the safetensors library and transformers write, and only the bytes that are asked for."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from moe_dualpipe.checkpoint.tensor_file import DTYPES, TensorEntry
from moe_dualpipe.checkpoint.tensor_folder import TensorFolder
from tests.support.safetensors_files import every_dtype, same, tensor_of, write_shards

A, B = tensor_of(torch.bfloat16, 4, 3), tensor_of(torch.float32, 2, 5)
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def test_every_dtype_and_shape_of_the_safetensors_library(tmp_path):
    tensors = every_dtype()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    folder = TensorFolder(tmp_path)
    assert folder.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        entry = folder.entries[name]
        assert (entry.dtype, entry.shape, entry.nbytes) == (tensor.dtype, tuple(tensor.shape), tensor.nbytes)
        assert same(folder.read(name), tensor), name
    assert {tensor.dtype for tensor in tensors.values()} == set(DTYPES.values())
    assert folder.bytes_read == sum(tensor.nbytes for tensor in tensors.values())


def test_one_entry_of_the_first_dimension_reads_only_its_bytes(tmp_path):
    experts, scalar, empty = tensor_of(torch.bfloat16, 5, 3, 7), tensor_of(torch.float32), torch.zeros(3, 0)
    save_file({"experts": experts, "scalar": scalar, "empty": empty}, tmp_path / "model.safetensors")
    folder = TensorFolder(tmp_path)
    for index in range(5):
        assert same(folder.read("experts", index), experts[index])
        assert folder.bytes_read == (index + 1) * 3 * 7 * 2
    assert same(folder.read("empty", 2), empty[2])
    for name, index in (("experts", 5), ("experts", -1), ("scalar", 0), ("empty", 3)):
        with pytest.raises(IndexError, match=f"'{name}' of shape .* has no entry {index}$"):
            folder.read(name, index)
    with pytest.raises(ValueError, match=f"^{tmp_path} has no tensor 'other'$"):
        folder.read("other")
    assert folder.bytes_read == experts.nbytes


def test_a_tensor_belongs_to_the_caller(tmp_path):
    save_file({"a": A}, tmp_path / "model.safetensors")
    folder = TensorFolder(tmp_path)
    folder.read("a").zero_()
    with torch.device("meta"):
        assert same(folder.read("a"), A)


def test_files_may_be_links_as_in_the_cache_of_huggingface_hub(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0a1b"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    write_shards(blobs, {FIRST: {"a": A}, SECOND: {"b": B}})
    for number, path in enumerate([*blobs.iterdir()]):
        blob = path.rename(blobs / f"{number:064}")
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    folder = TensorFolder(snapshot)
    assert same(folder.read("a"), A)
    assert same(folder.read("b"), B)


def test_open_folders_take_no_file_descriptors(tmp_path):
    write_shards(tmp_path, {f"{i}.safetensors": {str(i): A} for i in range(20)})
    before = len(os.listdir("/proc/self/fd"))
    folder = TensorFolder(tmp_path)
    assert all(same(folder.read(str(i)), A) for i in range(20))
    assert len(os.listdir("/proc/self/fd")) == before


def test_short_reads_go_on_and_errors_name_the_file(tmp_path, monkeypatch):
    save_file({"b": B}, tmp_path / "model.safetensors")
    folder, preadv = TensorFolder(tmp_path), os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: preadv(file, [buffers[0][:7]], at))
    assert same(folder.read("b"), B)

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ValueError, match=r"^cannot read \S*/model.safetensors at byte \d+: Input/output error$"):
        folder.read("b")


def test_files_that_change_after_they_were_opened_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": A}, path)
    saved = path.read_bytes()
    changes = {
        "truncated": lambda: os.truncate(path, len(saved) - 1),
        "replaced": lambda: shutil.copyfile(path, tmp_path / "copy") and (tmp_path / "copy").replace(path),
        "removed": path.unlink,
        "FIFO": lambda: path.unlink() or os.mkfifo(path),
    }
    for change in changes.values():
        path.unlink(missing_ok=True)
        path.write_bytes(saved)
        folder = TensorFolder(tmp_path)
        assert same(folder.read("a"), A)
        change()
        with pytest.raises(ValueError, match=r"model.safetensors"):
            folder.read("a")


READ_ALL = """
import resource, sys
from pathlib import Path
from moe_dualpipe.checkpoint.tensor_folder import TensorFolder
folder = TensorFolder(Path(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for name, entry in folder.entries.items():
    assert folder.read(name)[0, 0] == float(name)
    for index in range(entry.shape[0]):
        folder.read(name, index)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, folder.bytes_read)
"""


@pytest.mark.long
def test_peak_is_that_of_one_tensor(tmp_path):
    tensors = {str(i): torch.full((4, 2**20), float(i)) for i in range(12)}  # 16 MiB each, 192 MiB together
    write_shards(tmp_path, {FIRST: dict([*tensors.items()][:8]), SECOND: dict([*tensors.items()][8:])})
    command = [sys.executable, "-c", READ_ALL, str(tmp_path)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    kib, bytes_read = map(int, out.split())
    assert bytes_read == 2 * 12 * 2**24
    assert kib < 40 * 1024
