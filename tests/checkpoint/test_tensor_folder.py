"""Files of tensors: the safetensors library reads what is written, and writes what is read; damage is one line."""

import json
import os
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_dualpipe.checkpoint.tensor_file import DTYPES, write_tensors
from moe_dualpipe.checkpoint.tensor_folder import TensorFolder
from moe_dualpipe.checkpoint.tensor_writer import Shards, parse_size
from tests.support.mutations import check_message, mutations
from tests.support.safetensors_files import entry, every_dtype, same, tensor_of, write_file, write_shards

A, B = tensor_of(torch.bfloat16, 4, 3), tensor_of(torch.float32, 2, 5)
ONE = {"a": entry("F32", [2], 0, 8)}
SHARDS = {"1.safetensors": {"a": A}, "2.safetensors": {"b": B}}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def planned(tensors, *size):
    return Shards({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, *size)


def write(folder, tensors, *size):
    """Write as an export does."""
    shards = planned(tensors, *size)
    for file, names in shards.files.items():
        write_tensors(folder / file, {name: tensors[name] for name in names})
    for file, content in shards.index().items():
        (folder / file).write_bytes(content)
    return shards


# ---- Laws ----


@pytest.mark.parametrize("size", ["5GB", 100, 1])
def test_every_dtype_and_shape_is_read_as_written_by_both(tmp_path, size):
    tensors = every_dtype()
    write(tmp_path, tensors, size)
    folder = TensorFolder(tmp_path)
    theirs = {name: tensor for path in tmp_path.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert folder.entries.keys() == theirs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = folder.entries[name]
        assert (found.dtype, found.shape, found.nbytes) == (tensor.dtype, tuple(tensor.shape), tensor.nbytes)
        assert found.start % found.dtype.itemsize == 0 and same(theirs[name], tensor)
        assert same(folder.read(name), tensor), name
    assert {tensor.dtype for tensor in tensors.values()} == set(DTYPES.values())
    assert folder.bytes_read == sum(tensor.nbytes for tensor in tensors.values())
    os.umask(umask := os.umask(0))
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("*.safetensors")} == {0o666 & ~umask}


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
        assert len(shards.files) > 5 and shards.largest <= parse_size(size)
    sizes = {"e": 3, "b": 50, "c": 4, "d": 6, "a": 1}  # a larger tensor is alone
    shards = planned({name: tensor_of(torch.uint8, size) for name, size in sizes.items()}, 10)
    assert [*shards.files.values()] == [["e"], ["b"], ["c", "d"], ["a"]] and shards.largest == 50


def test_views_are_written_as_they_look_and_unknown_dtypes_are_refused(tmp_path):
    base = torch.randn(4, 6, requires_grad=True)
    views = {"t": base.T, "s": base[1:3, ::2], "e": base[:1].expand(3, 6), "first": base[0], "second": base[1]}
    write_tensors(tmp_path / SINGLE, views | {"again": base[0]})
    found = load_file(tmp_path / SINGLE)
    assert all(torch.equal(found[name], view) for name, view in views.items())
    with pytest.raises(ValueError, match=r"a safetensors file cannot store torch.complex128 of 'a'"):
        write_tensors(tmp_path / "other", {"a": torch.empty(2, dtype=torch.complex128)})
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / SINGLE, views)


def test_one_entry_of_the_first_dimension_reads_only_its_bytes(tmp_path):
    experts, scalar, empty = tensor_of(torch.bfloat16, 5, 3, 7), tensor_of(torch.float32), torch.zeros(3, 0)
    save_file({"experts": experts, "scalar": scalar, "empty": empty}, tmp_path / SINGLE)
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
    folder.read("experts").zero_()  # a tensor belongs to the caller
    with torch.device("meta"):
        assert same(folder.read("experts"), experts)


def test_files_may_be_links_as_in_the_cache_of_huggingface_hub_and_none_stays_open(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0a1b"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    write_shards(blobs, SHARDS)
    for number, path in enumerate([*blobs.iterdir()]):
        blob = path.rename(blobs / f"{number:064}")
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    before = len(os.listdir("/proc/self/fd"))
    folder = TensorFolder(snapshot)
    assert same(folder.read("a"), A) and same(folder.read("b"), B)
    assert len(os.listdir("/proc/self/fd")) == before


def test_short_reads_go_on_and_errors_name_the_file(tmp_path, monkeypatch):
    save_file({"b": B}, tmp_path / SINGLE)
    folder, preadv = TensorFolder(tmp_path), os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: preadv(file, [buffers[0][:7]], at))
    assert same(folder.read("b"), B)

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ValueError, match=r"^cannot read \S*/model.safetensors at byte \d+: Input/output error$"):
        folder.read("b")


@pytest.mark.parametrize("change", [
    lambda path: os.truncate(path, path.stat().st_size - 1), lambda path: path.unlink() or os.mkfifo(path),
    lambda path: shutil.copyfile(path, path.parent / "copy") and (path.parent / "copy").replace(path),
    lambda path: path.unlink(),
], ids=["truncated", "a pipe", "replaced", "removed"])  # fmt: skip
def test_files_that_change_after_they_were_opened_are_refused(tmp_path, change):
    save_file({"a": A}, tmp_path / SINGLE)
    folder = TensorFolder(tmp_path)
    assert same(folder.read("a"), A)
    change(tmp_path / SINGLE)
    with pytest.raises(ValueError, match=r"model.safetensors"):
        folder.read("a")


# ---- Damage ----


def refused(folder):
    with pytest.raises(ValueError) as error:
        TensorFolder(folder)
    check_message(error.value)
    assert str(folder) in str(error.value)
    return str(error.value).replace(f"{folder}/", "")


def opens_or_is_refused(folder):
    """Whether it opens; then every tensor can be read."""
    try:
        found = TensorFolder(folder)
    except ValueError as error:
        check_message(error)
        return False
    assert all(found.read(name).shape == found.entries[name].shape for name in found.entries)
    return True


def test_every_flipped_bit_and_wrong_value_of_a_header_or_index_is_refused_or_changes_little(tmp_path):
    draw, opened = random.Random(1), 0
    write_shards(tmp_path, {"1.safetensors": {"a": A, "empty": torch.zeros(0, 2)}, "2.safetensors": {"b": B, "c": A}})
    for name in ("1.safetensors", INDEX):
        path = tmp_path / name
        intact = path.read_bytes()
        header = 8 + int.from_bytes(intact[:8], "little") if name == "1.safetensors" else len(intact)
        for _ in range(300):
            data = bytearray(intact)
            for _ in range(draw.randint(1, 4)):
                data[draw.randrange(header)] ^= 1 << draw.randrange(8)
            path.write_bytes(data)
            opened += opens_or_is_refused(tmp_path)
        path.write_bytes(intact)
    assert opened < 20 and opens_or_is_refused(tmp_path)  # a flip in padding may go unnoticed
    write_shards(tmp_path, SHARDS)
    for _, text in mutations(json.loads((tmp_path / INDEX).read_text())):
        (tmp_path / INDEX).write_text(text)
        opens_or_is_refused(tmp_path)
    write_shards(tmp_path, SHARDS)
    intact = {"__metadata__": {"format": "pt"}, "a": entry("BF16", [4, 3], 0, 24)}
    for what, text in mutations(intact):
        write_file(tmp_path / "1.safetensors", text.encode(), bytes(24))
        if opens_or_is_refused(tmp_path):
            assert "metadata" in what or json.loads(text) == intact, what


def test_a_file_of_any_other_length_is_refused(tmp_path):
    path = tmp_path / SINGLE
    save_file({"a": A, "b": B}, path)
    intact = path.read_bytes()
    for data in (*(intact[:size] for size in range(len(intact))), intact + b"\0", b"\xff" * 100, b"PK\x03\x04"):
        path.write_bytes(data)
        assert f"it has {len(data)} bytes, and is incomplete or not a safetensors file" in refused(tmp_path)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    assert refused(tmp_path).endswith("it is a Git LFS pointer in place of the file: run git lfs pull")


HEADERS = [
    b"[" * 10_000, b'{"__metadata__": {"a": {}}}', {}, {"a": entry("F4", [16], 0, 8)}, {"a": entry("F32", [-2], 0, 8)},
    {"a": entry("F32", [2**62], 0, 8)}, {"a": entry("F32", [2**40, 2**40], 0, 8)},
    {"a": entry("F32", [2**40, 0, 2**40], 0, 0), "b": entry("U8", [8], 0, 8)}, {"a": entry("U8", [8] + [1] * 64, 0, 8)},
    {"a": entry("F32", [0], 8, 0)}, {"a": entry("F32", [3], 0, 8)}, {**ONE, "b": entry("U8", [8], 0, 8)},
    {"a": entry("U8", [5], 0, 5), "b": entry("U8", [4], 4, 8)}, {"a": entry("U8", [7], 1, 8)},
    {"a": entry("U8", [4], 0, 4), "b": entry("U8", [3], 5, 8)}, {"a": entry("F32", [4], 0, 16)}, {"\x1b[31m\n": 0},
]  # fmt: skip
"""Gaps, overlaps, and sizes that torch cannot hold."""


def test_headers_with_gaps_overlaps_and_huge_sizes_are_refused(tmp_path):
    for header in HEADERS:
        write_file(tmp_path / SINGLE, header, bytes(8))
        assert refused(tmp_path).startswith("cannot read model.safetensors: "), header
    write_file(tmp_path / SINGLE, ONE, bytes(8))
    assert TensorFolder(tmp_path).read("a").tolist() == [0, 0]


@pytest.mark.parametrize("changes,problem", [
    ({"c": "3.safetensors"}, "it lists 3.safetensors, not found: download or copy the folder again"),
    ({"c": "2.safetensors"}, "of 'c', 2.safetensors does not have it"),
    ({"a": "2.safetensors", "b": "1.safetensors"}, "of 'a', 1.safetensors has it, but it is not listed there"),
    ({"a": None, "d": "1.safetensors"}, "of 'a', 1.safetensors has it, but it is not listed there"),
    ({"c": "../x.safetensors"}, "'../x.safetensors' is not a valid file name"),
    ({"c": "/etc/passwd"}, "'/etc/passwd' is not a valid file name"), ({"c": ".."}, "'..' is not a valid file name"),
    ({"c": ["1.safetensors"]}, "is not a valid file name"),
], ids=str)  # fmt: skip
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path, changes, problem):
    message = refused(write_shards(tmp_path, SHARDS, **changes))
    assert message.startswith(f"cannot read {INDEX}: ") and problem in message


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    write_shards(tmp_path, {**SHARDS, "2.safetensors": {"b": B, "a": A}}, a="1.safetensors")
    assert refused(tmp_path).endswith(": of 'a', 2.safetensors has it, but it is not listed there")


@pytest.mark.parametrize("name", [SINGLE, INDEX, "1.safetensors"])
def test_special_files_are_refused_at_once(tmp_path, name):
    path = tmp_path / name
    kinds = [path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero"), lambda: path.symlink_to("no")]
    for create in (*kinds, lambda: path.symlink_to(path.name)):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        if name == "1.safetensors":
            write_shards(tmp_path, SHARDS)
            path.unlink()
        create()
        assert refused(tmp_path).startswith(f"cannot read {name}: ")


def test_pickles_and_folders_without_weights_are_refused_with_the_way_out(tmp_path):
    neither = f"{tmp_path} has neither {SINGLE} nor {INDEX}; pickles (.bin, .pt) can run code, so they are not read: "
    for name in ("pytorch_model-00001-of-00002.bin", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes(b"")
        assert refused(tmp_path).startswith(neither)
    assert refused(tmp_path).endswith(f"from_pretrained('{tmp_path}').save_pretrained('{tmp_path}-safetensors')")


def test_sizes():
    texts = {"5GB": 5 * 10**9, "512MiB": 2**29, "1.5 kb": 1500, " 2TB ": 2 * 10**12, 7: 7}
    assert {text: parse_size(text) for text in texts} == texts
    for text in ("5", "GB", "-1GB", "0KB", 0, -3, "1e3KB", "5 gallons", "nanGB", "9" * 99 + "GB", 1.5, None):
        with pytest.raises(ValueError, match="a shard size is a number of bytes, or a text such as 5GB: got "):
            parse_size(text)
