"""Files of tensors: the safetensors library reads what is written, and writes what is read; damage is one line."""

import json
import os
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_dualpipe.checkpoint.huggingface.save import parse_size
from moe_dualpipe.checkpoint.tensor_file import DTYPES, TensorFolder, write_tensors
from moe_dualpipe.data.files import divide
from tests.support.mutations import check_message, mutations
from tests.support.safetensors_files import entry, every_dtype, same, tensor_of, write_file, write_shards

A, B = tensor_of(torch.bfloat16, 4, 3), tensor_of(torch.float32, 2, 5)
SHARDS = {"1.safetensors": {"a": A}, "2.safetensors": {"b": B}}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


# ---- Laws ----


@pytest.mark.parametrize("size", [10**9, 100, 1])
def test_every_dtype_and_shape_is_read_as_written_by_both(tmp_path, size):
    tensors, shards = every_dtype(), {}
    for i, names in enumerate(divide({name: tensor.nbytes for name, tensor in tensors.items()}, size)):
        write_tensors(tmp_path / f"{i}.safetensors", {name: tensors[name] for name in names})
        shards |= dict.fromkeys(names, f"{i}.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": shards}))
    folder = TensorFolder(tmp_path)
    theirs = {name: tensor for path in tmp_path.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert folder.entries.keys() == theirs.keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = folder.entries[name]
        assert (found.dtype, found.shape, found.nbytes) == (tensor.dtype, tuple(tensor.shape), tensor.nbytes)
        assert found.start % found.dtype.itemsize == 0 and same(theirs[name], tensor)
        assert same(folder.read(name), tensor), name
    assert {tensor.dtype for tensor in tensors.values()} == set(DTYPES.values())
    os.umask(umask := os.umask(0))
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("*.safetensors")} == {0o666 & ~umask}


@pytest.mark.parametrize("size", [40, 60, 1, "0.1KB"])
def test_files_are_divided_as_by_huggingface_hub(size):
    hub = pytest.importorskip("huggingface_hub")
    tensors = {f"layers.{i}.up": tensor_of(torch.float32, 1 + 7 * i % 10) for i in range(23)}  # 4 to 40 bytes
    theirs = hub.split_torch_state_dict_into_shards(tensors, max_shard_size=size).filename_to_tensors
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    assert divide(sizes, parse_size(size)) == [*theirs.values()]
    assert divide({"e": 3, "b": 50, "c": 4, "d": 6, "a": 1}, 10) == [["e"], ["b"], ["c", "d"], ["a"]]  # b is larger


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


def test_files_may_be_links_as_in_the_cache_of_huggingface_hub(tmp_path):
    (blobs := tmp_path / "blobs").mkdir()
    write_shards(blobs, SHARDS)
    for path in blobs.iterdir():
        (tmp_path / path.name).symlink_to(os.path.relpath(path, tmp_path))
    folder = TensorFolder(tmp_path)
    folder.read("a").zero_()  # a tensor belongs to the caller
    with torch.device("meta"):
        assert same(folder.read("a"), A) and same(folder.read("b"), B)
    with pytest.raises(ValueError, match=f"^{tmp_path} has no tensor 'other'$"):
        folder.read("other")


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
    header, index = tmp_path / "1.safetensors", tmp_path / INDEX
    intact = {header: header.read_bytes(), index: index.read_bytes()}
    ends = {header: 8 + int.from_bytes(intact[header][:8], "little"), index: len(intact[index])}
    for path in (*[header] * 300, *[index] * 300):
        data = bytearray(intact[path])
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(ends[path])] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        opened += opens_or_is_refused(tmp_path)
        path.write_bytes(intact[path])
    assert opened < 20 and opens_or_is_refused(tmp_path)  # a flip in padding may go unnoticed
    for _, text in mutations(json.loads(intact[index])):
        index.write_text(text)
        opens_or_is_refused(tmp_path)
    write_shards(tmp_path, SHARDS)
    described = {"__metadata__": {"format": "pt"}, "a": entry("BF16", [4, 3], 0, 24)}
    for what, text in mutations(described):
        write_file(header, text.encode(), bytes(24))
        if opens_or_is_refused(tmp_path):
            assert "metadata" in what or json.loads(text) == described, what


def test_a_file_of_any_other_length_is_refused(tmp_path):
    path = tmp_path / SINGLE
    save_file({"a": A, "b": B}, path)
    intact = path.read_bytes()
    for data in (*(intact[:size] for size in range(len(intact))), intact + b"\0", b"\xff" * 100, b"PK\x03\x04"):
        path.write_bytes(data)
        assert f"it has {len(data)} bytes, and is incomplete or not a safetensors file" in refused(tmp_path)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    assert refused(tmp_path).endswith("it is a Git LFS pointer in place of the file: run git lfs pull")


@pytest.mark.parametrize("dtype,shape,size,problem", [
    ("F32", [2**40, 0, 2**40], 0, "which torch cannot hold"), ("U8", [8] + [1] * 64, 8, "which torch cannot hold"),
    ("F4", [16], 8, "'a' has dtype 'F4'; supported are F64, "),
], ids=str)  # fmt: skip
def test_what_torch_cannot_hold_is_refused(tmp_path, dtype, shape, size, problem):
    write_file(tmp_path / SINGLE, {"a": entry(dtype, shape, 0, size)}, bytes(size))
    assert problem in refused(tmp_path)


@pytest.mark.parametrize("changes,problem", [
    ({"c": "3.safetensors"}, "it lists 3.safetensors, not found: download or copy the folder again"),
    ({"c": "2.safetensors"}, "of 'c', 2.safetensors does not have it"),
    ({"a": "2.safetensors", "b": "1.safetensors"}, "of 'a', 1.safetensors has it, but it is not listed there"),
    ({"a": None, "d": "1.safetensors"}, "of 'a', 1.safetensors has it, but it is not listed there"),
    ({"c": "../x.safetensors"}, "'../x.safetensors' is not a valid file name"),
    ({"c": "/etc/passwd"}, "'/etc/passwd' is not a valid file name"), ({"c": ".."}, "'..' is not a valid file name"),
    ({"c": ["1.safetensors"]}, "Expected `str`, got `array`"),
], ids=str)  # fmt: skip
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path, changes, problem):
    message = refused(write_shards(tmp_path, SHARDS, **changes))
    assert message.startswith(f"cannot read {INDEX}: ") and problem in message


@pytest.mark.parametrize("name", [SINGLE, INDEX, "1.safetensors"])
@pytest.mark.parametrize("create", [
    lambda path: path.mkdir(), os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to("no"),
    lambda path: path.symlink_to(path.name),
], ids=["folder", "pipe", "device", "broken link", "circle"])  # fmt: skip
def test_special_files_are_refused_at_once(tmp_path, name, create):
    if name == "1.safetensors":
        write_shards(tmp_path, SHARDS)
        (tmp_path / name).unlink()
    create(tmp_path / name)
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
