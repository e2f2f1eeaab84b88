"""Folders that are damaged, incomplete or malicious: an error of one line that names the file, and nothing is read."""

import json
import os
import random

import pytest
import torch
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


HEADERS = [
    b"{", b'{"\xff', b"[]", b"[" * 10_000, b'{"__metadata__": 3}', b'{"__metadata__": {"a": {}}}', {}, {"a": [0]},
    {"a": {"shape": [2], "data_offsets": [0, 8]}}, {"a": entry("F4", [16], 0, 8)}, {"a": entry(["F32"], [2], 0, 8)},
    {"a": entry("F32", [-2], 0, 8)}, {"a": entry("F32", [2.0], 0, 8)}, {"a": entry("F32", [True, 2], 0, 8)},
    {"a": entry("F32", [2**62], 0, 8)}, {"a": entry("F32", [2**40, 2**40], 0, 8)}, {"a": entry("F32", 2, 0, 8)},
    {"a": entry("F32", [2**40, 0, 2**40], 0, 0), "b": entry("U8", [8], 0, 8)}, {"a": entry("U8", [8] + [1] * 64, 0, 8)},
    {"a": entry("F32", [2], 0, 8, 8)}, {"a": entry("F32", [0], 8, 0)}, {"a": entry("F32", [2], -8, 0)},
    {"a": entry("F32", [3], 0, 8)}, {**ONE, "b": entry("U8", [8], 0, 8)},
    {"a": entry("U8", [5], 0, 5), "b": entry("U8", [4], 4, 8)},
    {"a": entry("U8", [4], 0, 4), "b": entry("U8", [3], 5, 8)}, {"a": entry("U8", [7], 1, 8)},
    {"a": entry("U8", [7], 0, 7)}, {"a": entry("F32", [4], 0, 16)}, {"\x1b[31m\n": 0},
]  # fmt: skip
"""Wrong values, gaps, overlaps, and sizes that torch cannot hold."""


def test_invalid_headers(tmp_path):
    for header in HEADERS:
        write_file(tmp_path / "model.safetensors", header, bytes(8))
        assert refused(tmp_path).startswith("cannot read model.safetensors: "), header
    write_file(tmp_path / "model.safetensors", ONE, bytes(8))
    assert TensorFolder(tmp_path).read("a").tolist() == [0, 0]


def test_truncated_files(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": A, "b": B}, path)
    intact = path.read_bytes()
    for size in range(len(intact)):
        path.write_bytes(intact[:size])
        assert f"it has {size} bytes, and is incomplete or not a safetensors file" in refused(tmp_path)
    for data in (intact + b"\0", b"\xff" * 100, b"PK\x03\x04" + bytes(100), (93).to_bytes(8, "little") + bytes(92)):
        path.write_bytes(data)
        assert f"it has {len(data)} bytes, and is incomplete or not a safetensors file" in refused(tmp_path)
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
        ({"a": "2.safetensors", "b": "1.safetensors"}, "in '1.safetensors', but 2.safetensors has it"),
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
    assert refused(tmp_path).endswith("index.json: it lists 'c' in None, but 2.safetensors has it")
    write_shards(tmp_path, {**SHARDS, "2.safetensors": {"b": B, "a": A}}, a="1.safetensors")
    assert refused(tmp_path).endswith(": it lists 'a' in '1.safetensors', but 2.safetensors has it")


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
