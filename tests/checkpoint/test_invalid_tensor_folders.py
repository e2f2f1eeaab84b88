"""Folders that are damaged, incomplete or malicious: an error of one line that names the file, and nothing is read."""

import json
import os
import random

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moe_dualpipe.checkpoint.tensor_folder import TensorFolder
from tests.support.mutations import check_message, mutations
from tests.support.safetensors_files import entry, tensor_of, write_file, write_shards

A, B = tensor_of(torch.bfloat16, 4, 3), tensor_of(torch.float32, 2, 5)
ONE = {"a": entry("F32", [2], 0, 8)}


def refused(folder):
    with pytest.raises(ValueError) as error:
        TensorFolder(folder)
    check_message(error.value)
    assert str(folder) in str(error.value)
    return str(error.value).replace(f"{folder}/", "")


HEADERS = {
    "not JSON": (b"{", "Expecting property name"),
    "not text": (b'{"\xff', "not text"),
    "a list": (b"[]", "its header is not a JSON object"),
    "two values": (b'{"a": 0, "a": 0}', "it has two values for 'a'"),
    "nested": (b"[" * 10_000, "nested more than 32 levels deep"),
    "nested in metadata": (b'{"__metadata__": {"a": {}}}', "its __metadata__ is not an object of strings"),
    "metadata": (b'{"__metadata__": 3}', "its __metadata__ is not an object of strings"),
    "not an entry": ({"a": [0]}, "'a': it is not a JSON object"),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, "'a': it has no dtype"),
    "unknown dtype": ({"a": entry("F4", [16], 0, 8)}, "'a': unknown dtype 'F4'; supported are F64, F32"),
    "dtype": ({"a": entry(["F32"], [2], 0, 8)}, "'a': unknown dtype ['F32']"),
    "negative": ({"a": entry("F32", [-2], 0, 8)}, "'a': -2 is not a valid count"),
    "two negative": ({"a": entry("F32", [-1, -2], 0, 8)}, "'a': -1 is not a valid count"),
    "not whole": ({"a": entry("F32", [2.0], 0, 8)}, "'a': 2.0 is not a valid count"),
    "true": ({"a": entry("F32", [True, 2], 0, 8)}, "'a': True is not a valid count"),
    "huge": ({"a": entry("F32", [2**62], 0, 8)}, "'a': 4611686018427387904 is not a valid count"),
    "huge product": ({"a": entry("F32", [2**40, 2**40], 0, 8)}, "'a': 1208925819614629174706176 is not"),
    "huge and empty": ({"a": entry("F32", [2**40, 0, 2**40], 0, 0)}, "'a': 1208925819614629174706176 is not"),
    "many dimensions": ({"a": entry("F32", [1] * 65, 0, 4)}, "'a': [1, 1"),
    "shape": ({"a": entry("F32", 2, 0, 8)}, "'a': 2 is not a shape"),
    "offsets": ({"a": entry("F32", [2], 0, 8, 8)}, "'a': [0, 8, 8] is not a range of bytes"),
    "backwards": ({"a": entry("F32", [0], 8, 0)}, "'a': it has -8 bytes, but F32 [0] takes 0"),
    "negative offset": ({"a": entry("F32", [2], -8, 0)}, "'a': -8 is not a valid count"),
    "size": ({"a": entry("F32", [3], 0, 8)}, "'a': it has 8 bytes, but F32 [3] takes 12"),
    "overlap": ({**ONE, "b": entry("U8", [8], 0, 8)}, "overlaps another tensor: it starts at byte"),
    "part overlaps": ({"a": entry("U8", [5], 0, 5), "b": entry("U8", [4], 4, 8)}, "'b' overlaps another tensor"),
    "gap": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [3], 5, 8)}, "'b' leaves a gap before it: it starts"),
    "gap at first": ({"a": entry("U8", [7], 1, 8)}, "'a' leaves a gap before it"),
    "rest": ({"a": entry("U8", [7], 0, 7)}, "the rest belongs to no tensor"),
    "nothing": ({}, "the rest belongs to no tensor"),
    "past the end": ({"a": entry("F32", [4], 0, 16)}, "it is incomplete"),
    "escapes": ({"\x1b[31m\n": 0}, r"'\x1b[31m\n': it is not a JSON object"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_invalid_headers(tmp_path, name):
    header, problem = HEADERS[name]
    path = write_file(tmp_path / "model.safetensors", header, bytes(8))
    message = refused(tmp_path)
    assert message.startswith("cannot read model.safetensors: ")
    assert problem in message
    if name not in ("two values", "huge and empty", "many dimensions", "unknown dtype"):  # the library is laxer
        with pytest.raises(SafetensorError):
            safe_open(path, "pt").__enter__()


def test_truncated_files(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": A, "b": B}, path)
    intact = path.read_bytes()
    for size in range(len(intact)):
        path.write_bytes(intact[:size])
        assert "it is incomplete" in refused(tmp_path)
    path.write_bytes(intact + b"\0")
    assert "the rest belongs to no tensor" in refused(tmp_path)


def test_long_headers_and_other_formats(tmp_path):
    path = tmp_path / "model.safetensors"
    for start in (b"\xff" * 100, b"PK\x03\x04" + bytes(100), (93).to_bytes(8, "little") + bytes(92)):
        path.write_bytes(start)
        assert f"it has {len(start)} bytes, fewer than its header" in refused(tmp_path)
    path.write_bytes((100_000_001).to_bytes(8, "little"))
    os.truncate(path, 200_000_000)  # takes no space on disk
    assert "its header has 100,000,001 bytes, at most 100,000,000 are valid" in refused(tmp_path)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    assert refused(tmp_path).endswith("it is a Git LFS pointer in place of the file: run git lfs pull")


SHARDS = {"1.safetensors": {"a": A}, "2.safetensors": {"b": B}}


@pytest.mark.parametrize(
    "changes,problem",
    [
        (
            {"c": "3.safetensors"},
            "model.safetensors.index.json: it lists 3.safetensors, not found: download or copy the folder again",
        ),
        ({"c": "2.safetensors"}, "it lists 'c' in 2.safetensors, which does not have it"),
        ({"a": "2.safetensors"}, "which does not have it"),
        ({"a": "2.safetensors", "b": "1.safetensors"}, "but 2.safetensors has a tensor of this name"),
        ({"c": "../x.safetensors"}, "'../x.safetensors' is not a valid file name"),
        ({"c": "/etc/passwd"}, "'/etc/passwd' is not a valid file name"),
        ({"c": ".."}, "'..' is not a valid file name"),
        ({"c": "a\\b"}, "is not a valid file name"),
        ({"c": ""}, "'' is not a valid file name"),
        ({"c": ["1.safetensors"]}, "is not a valid file name"),
        ({"c": 3}, "3 is not a valid file name"),
    ],
    ids=str,
)
def test_invalid_weight_maps(tmp_path, changes, problem):
    message = refused(write_shards(tmp_path, SHARDS, **changes))
    assert problem in message
    assert message.startswith("cannot read ")


def test_a_tensor_must_be_listed_and_in_one_shard(tmp_path):
    write_shards(tmp_path, {**SHARDS, "2.safetensors": {"b": B, "c": A}}, c=None)
    assert refused(tmp_path).endswith("index.json: it does not list 'c' of 2.safetensors")
    write_shards(tmp_path, {**SHARDS, "2.safetensors": {"b": B, "a": A}}, a="1.safetensors")
    assert refused(tmp_path).endswith(": it lists 'a' in 1.safetensors, but 2.safetensors has a tensor of this name")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": null}', "[" * 9999, "\udcff"])
def test_invalid_indices(tmp_path, text):
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert refused(tmp_path).startswith(f"cannot read {path.name}: ")


def special_files(path):
    yield "a folder", path.mkdir
    yield "a FIFO", lambda: os.mkfifo(path)
    yield "a device", lambda: path.symlink_to("/dev/zero")
    yield "a link to nothing", lambda: path.symlink_to("nothing")
    yield "a link to itself", lambda: path.symlink_to(path.name)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "1.safetensors"])
def test_special_files_are_refused_at_once(tmp_path, name):
    for kind, create in special_files(tmp_path / name):
        for path in tmp_path.iterdir():
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        if name == "1.safetensors":
            write_shards(tmp_path, SHARDS)
            (tmp_path / name).unlink()
        create()
        assert refused(tmp_path).startswith(f"cannot read {name}: "), kind


def test_pickles_are_refused_with_the_way_to_convert_them(tmp_path):
    for name in ("pytorch_model-00001-of-00002.bin", "model.pt", "consolidated.00.pth", "last.ckpt"):
        (tmp_path / name).write_bytes(b"")
        message = refused(tmp_path)
        assert (
            f"{tmp_path} holds weights as pickles, which can run code ({name}): convert them to safetensors" in message
        )
        assert message.endswith(f"from_pretrained('{tmp_path}').save_pretrained('{tmp_path}-safetensors')")
        (tmp_path / name).unlink()
    (tmp_path / "training_args.bin").write_bytes(b"")
    save_file({"a": A}, tmp_path / "model.safetensors")
    assert [*TensorFolder(tmp_path).entries] == ["a"]


def test_folders_without_weights(tmp_path):
    neither = f"{tmp_path} has neither model.safetensors nor model.safetensors.index.json"
    assert refused(tmp_path) == neither
    (tmp_path / "model.bin").write_bytes(b"")
    save_file({"a": A}, tmp_path / "adapter_model.safetensors")
    assert refused(tmp_path) == f"{neither}, only adapter_model.safetensors"
    assert "No such file or directory" in refused(tmp_path / "nothing")
    assert "Not a directory" in refused(tmp_path / "model.bin")


def flipped(intact, draw, stop):
    """`intact` with one to four bits of its first `stop` bytes flipped."""
    data = bytearray(intact)
    for _ in range(draw.randint(1, 4)):
        data[draw.randrange(stop)] ^= 1 << draw.randrange(8)
    return bytes(data)


def opens_or_is_refused(folder):
    """Whether it opens; then every tensor can be read."""
    try:
        found = TensorFolder(folder)
    except ValueError as error:
        check_message(error)
        return False
    assert all(found.read(name).shape == found.entries[name].shape for name in found.entries)
    return True


@pytest.mark.parametrize("seed", range(5))
def test_flipped_bits_of_headers_and_indices(tmp_path, seed):
    draw, opened = random.Random(seed), 0
    write_shards(tmp_path, {"1.safetensors": {"a": A, "empty": torch.zeros(0, 2)}, "2.safetensors": {"b": B, "c": A}})
    for name in ("1.safetensors", "model.safetensors.index.json"):
        path = tmp_path / name
        intact = path.read_bytes()
        header = 8 + int.from_bytes(intact[:8], "little") if name == "1.safetensors" else len(intact)
        for _ in range(200):
            path.write_bytes(flipped(intact, draw, header))
            opened += opens_or_is_refused(tmp_path)
        path.write_bytes(intact)
        assert opens_or_is_refused(tmp_path)
    assert opened < 40  # a flip in padding or in a field that is ignored may go unnoticed


def test_every_wrong_value_in_a_header_or_index(tmp_path):
    write_shards(tmp_path, SHARDS)
    index = tmp_path / "model.safetensors.index.json"
    intact = index.read_bytes()
    for _, text in mutations(json.loads(intact)):
        index.write_text(text)
        opens_or_is_refused(tmp_path)
    index.write_bytes(intact)
    shard = tmp_path / "1.safetensors"
    intact = {"__metadata__": {"format": "pt"}, "a": entry("BF16", [4, 3], 0, 24)}
    for what, text in mutations(intact):
        write_file(shard, text.encode(), bytes(24))
        if opens_or_is_refused(tmp_path):
            assert "metadata" in what or json.loads(text) == intact, what
