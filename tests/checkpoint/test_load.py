"""Loading checkpoints: broken ones are detected, hostile ones run no code, and all ranks agree."""

import io
import json
import os
import pickle
import random

import pytest
import torch

from moe_dualpipe.checkpoint import (
    check_model,
    find_checkpoint,
    load_checkpoint,
    manifest,
    read_manifest,
    verify_checkpoint,
)
from moe_dualpipe.checkpoint.manifest import FileChecksum, Manifest
from moe_dualpipe.data import strict_json
from moe_dualpipe.models import ModelConfig
from tests.support.checkpoints import loaded_step, newest, state_of
from tests.support.mutations import check_message
from tests.support.ranks import run_ranks


def update_checksums(folder):
    """Rewrite run.json so that it matches the files, as an attacker would."""
    old = json.loads((folder / "run.json").read_text())
    files = {path.name: FileChecksum.of(path.read_bytes()) for path in folder.iterdir() if path.name != "run.json"}
    (folder / "run.json").write_bytes(Manifest(old["step"], old["model"], files).encode())


# ---- Broken checkpoints ----


def flip_bit(path, byte, bit=3):
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def link(path, target):
    path.rename(target)
    path.symlink_to(target)
    return target


def pipe(path, *_):
    path.unlink()
    os.mkfifo(path)


TOKENS, FIRST, SECOND = "tokens.txt", "rank-0-0.safetensors", "rank-1-0.safetensors"


DAMAGES = {
    "truncated": (lambda c: truncate(c / "rank-1-0.safetensors"), "rank-1-0.safetensors has "),
    "longer": (lambda c: (c / "rank-0-0.safetensors").open("ab").write(b"x"), "rank-0-0.safetensors has "),
    "flipped": (lambda c: flip_bit(c / SECOND, 100), f"{SECOND} does not match its checksum"),
    "missing": (lambda c: (c / "rank-0-0.safetensors").unlink(), "rank-0-0.safetensors is missing"),
    "a missing extra file": (lambda c: (c / "tokens.txt").unlink(), "tokens.txt is missing"),
    "a link": (lambda c: link(c / TOKENS, c.parent / TOKENS), f"{TOKENS} is refused: it is a symbolic link"),
    "a link inside": (lambda c: link(c / TOKENS, c / "copy"), f"{TOKENS} is refused: it is a symbolic link"),
    "a dangling link": (lambda c: (c / link(c / TOKENS, c / "x")).unlink(), f"{TOKENS} is refused: it is a symbolic"),
    "a linked run.json": (lambda c: link(c / "run.json", c.parent / "run"), "cannot read run.json: it is a symbolic"),
    "a pipe": (lambda c: pipe(c / TOKENS), f"{TOKENS} is refused: it is not a file"),
    "a pipe as run.json": (lambda c: pipe(c / "run.json"), "cannot read run.json: it is not a file"),
    "nested": (lambda c: (c / "run.json").write_text("[" * 5000 + "]" * 5000), "cannot read run.json: its objects "),
    "a nested model": (
        lambda c: (c / "run.json").write_text('{"step": 9, "model": {"a": ' + "[" * 99 + "]" * 99 + '}, "files": {}}'),
        "cannot read run.json: its objects and lists are nested more than 32 levels deep",
    ),
    "a folder": (lambda c: [(c / TOKENS).unlink(), (c / TOKENS).mkdir()], f"{TOKENS} is refused: it is not a file"),
    "no run.json": (lambda c: (c / "run.json").unlink(), "cannot read run.json: No such file"),
    "an empty run.json": (lambda c: (c / "run.json").write_bytes(b""), "cannot read run.json: Expecting value"),
    "another step": (
        lambda c: (c / "run.json").write_text((c / "run.json").read_text().replace('"step": 9', '"step": 8')),
        "cannot read run.json: its checksum does not match",
    ),
    "empty folder": (lambda c: [path.unlink() for path in c.iterdir()], "cannot read run.json: No such file"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_find_reports_a_broken_checkpoint_and_returns_the_newest_intact_one(run, damage):
    damage_checkpoint, reason = DAMAGES[damage]
    damage_checkpoint(newest(run))
    messages = []
    found = find_checkpoint(str(run), messages.append)
    assert loaded_step(found) == 5
    (line,) = messages
    assert line.startswith(f"skipped broken checkpoint {newest(run)}: {reason}")
    with pytest.raises(ValueError) as error:
        find_checkpoint(str(newest(run)))
    assert str(error.value).startswith(f"{newest(run)} is broken: {reason}")
    assert str(error.value).endswith(f"; the newest intact checkpoint of this run is {found}")


def test_find_names_every_checkpoint_if_all_are_broken(run):
    for path in (run / "checkpoints").iterdir():
        truncate(path / "rank-0-0.safetensors")
    with pytest.raises(
        ValueError, match=r"all checkpoints in .* are broken: .*step-000009: rank-0-0.*step-000005: .*step-000003: "
    ):
        find_checkpoint(str(run))
    with pytest.raises(ValueError, match=r"is broken: .*; this run has no intact checkpoint"):
        find_checkpoint(str(newest(run)))


def test_verify_detects_every_flipped_bit(run):
    rng = random.Random(0)
    for path in sorted(newest(run).iterdir()):
        original = path.read_bytes()
        for _ in range(12):
            flip_bit(path, rng.randrange(len(original)), rng.randrange(8))
            with pytest.raises(ValueError, match=r"run\.json|does not match its checksum"):
                verify_checkpoint(newest(run))
            path.write_bytes(original)
    assert verify_checkpoint(newest(run)).step == 9


def load_on_two_ranks(rank, folders):
    with pytest.raises(ValueError, match="the ranks found different checkpoints"):
        load_checkpoint(folders[rank], state_of(rank, 0))
    missing = {f"missing{rank}": torch.zeros(1)} if rank else {}
    with pytest.raises(ValueError, match="has no missing1"):  # also on rank 0, which finds all its tensors
        load_checkpoint(folders[0], state_of(rank, 0) | missing)
    with pytest.raises(ValueError, match=r": rank1 has shape \[1, 8\], expected \[2, 4\]"):
        load_checkpoint(folders[0], {"rank1": torch.zeros(2, 4)})
    load_checkpoint(folders[0], state := state_of(rank, 0))
    return int(state["both"][0, 0, 0])


def test_a_load_that_fails_on_one_rank_fails_on_all(run):
    folders = [run / "checkpoints" / f"step-00000{step}" for step in (5, 9)]
    assert run_ranks(2, load_on_two_ranks, folders) == [5, 5]


def test_the_folder_of_a_checkpoint_may_be_a_link(run):
    newest(run).rename(run / "elsewhere")
    newest(run).symlink_to(run / "elsewhere")
    assert loaded_step(find_checkpoint(str(run))) == 9


# ---- Hostile checkpoints ----


class Attack:
    """Creates a marker file when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


def test_the_attack_works_on_a_plain_unpickler(tmp_path):
    buffer = io.BytesIO()
    torch.save(Attack(tmp_path / "marker"), buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=False)
    assert (tmp_path / "marker").exists()


def make_payload(kind, marker):
    if kind == "pickle":
        return pickle.dumps(Attack(marker)).ljust(600, b"\0")
    torch.save(Attack(marker), buffer := io.BytesIO())
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["pickle", "saved"])
def test_a_payload_that_is_not_a_tensor_is_rejected(run, kind):
    marker = run / "marker"
    (newest(run) / "rank-0-0.safetensors").write_bytes(make_payload(kind, marker))
    update_checksums(newest(run))
    with pytest.raises(ValueError, match=r"cannot read .*rank-0-0.safetensors: it has .* not a safetensors") as refused:
        loaded_step(find_checkpoint(str(run)))
    check_message(refused.value)
    assert not marker.exists()


def with_field(key, value):
    return lambda saved: {**saved, key: value}


def with_file(name, length=1):
    return lambda saved: {**saved, "files": {**saved["files"], name: {"length": length, "crc32": 0}}}


INVALID_MANIFESTS = {
    "a list": lambda _: [1, 2],
    "deeply nested": lambda _: b"[" * 200_000,
    "binary": lambda _: b"\x80\x04\x95",
    "a negative step": with_field("step", -1),
    "a step that is text": with_field("step", "3"),
    "a step that is true": with_field("step", True),
    "a huge step": lambda _: b'{"step": ' + b"9" * 10_000 + b"}",
    "a model that is a number": with_field("model", 7),
    "files that are a list": with_field("files", ["tensors.json"]),
    "no files": with_field("files", {}),
    "a path upwards": with_file("../../secret"),
    "a path from the root": with_file("/etc/passwd"),
    "the folder above": with_file(".."),
    "a length that is text": with_file("x", "1"),
}


def write_json(path, change, checksum=True):
    saved = change(json.loads(path.read_text()))
    if checksum and isinstance(saved, dict):
        rest = {key: value for key, value in saved.items() if key != "checksum"}
        saved["checksum"] = manifest.zlib.crc32(json.dumps(rest, sort_keys=True).encode())
    path.write_bytes(saved if isinstance(saved, bytes) else json.dumps(saved).encode())


@pytest.mark.parametrize("case", INVALID_MANIFESTS)
def test_an_invalid_run_json_is_rejected(run, case):
    write_json(newest(run) / "run.json", INVALID_MANIFESTS[case])
    with pytest.raises(ValueError, match=r"step-000009 is broken: cannot read run.json: .{5,}"):
        find_checkpoint(str(newest(run)))
    with pytest.raises(ValueError, match=r"cannot read .*run.json: .{5,}"):
        check_model(newest(run), ModelConfig())


def test_a_valid_run_json_passes_with_the_checksum_of_the_cases_above(run):
    write_json(newest(run) / "run.json", with_file("notes"))
    assert read_manifest(newest(run)).files["notes"] == FileChecksum(1, 0)


def test_a_run_json_that_is_too_large_is_not_read(run, monkeypatch):
    monkeypatch.setattr(strict_json, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match=r"run\.json: it has more than 1,000 bytes"):
        read_manifest(newest(run))


@pytest.mark.parametrize("name", ["rank-0-0.safetensors", "rank-1-0.safetensors"])
def test_a_file_that_is_shorter_than_its_tensors_is_refused(run, name):
    truncate(newest(run) / name)
    update_checksums(newest(run))
    with pytest.raises(ValueError, match=rf"cannot read .*{name}: it has [\d,]+ bytes, and is incomplete"):
        loaded_step(find_checkpoint(str(run)))


@pytest.mark.parametrize("replace", [link, pipe])
def test_a_file_that_run_json_does_not_list_is_refused_unless_it_is_regular(run, replace):
    replace(newest(run) / "rank-1-0.safetensors", run / "outside")
    old = json.loads((newest(run) / "run.json").read_text())
    files = {"tensors.json": FileChecksum.of((newest(run) / "tensors.json").read_bytes())}
    (newest(run) / "run.json").write_bytes(Manifest(old["step"], old["model"], files).encode())
    with pytest.raises(ValueError, match=r"cannot read .*tensors.json: rank-1-0.safetensors is refused: it is "):
        loaded_step(find_checkpoint(str(run)))


@pytest.mark.parametrize("change,message", [
    ({"file": "../step-000005/rank-0-0.safetensors"}, "is not a valid file name"),
    ({"file": "/etc/passwd"}, "is not a valid file name"),
    ({"file": 3}, "is not a valid file name"),
    ({"file": "missing"}, "missing is missing"),
    ({"dtype": "save"}, "unknown dtype 'save'; supported are F64, "),
    ({"shape": [-1]}, "is not a valid count"),
    ({"shape": [1] * 100_000}, "… is not a shape$"),
    ({"shape": {"3": 1}}, "{'3': 1} is not a shape$"),
    ({"shape": [2**20, 2**20]}, "'both' has 4,398,046,511,104 bytes, but rank-0-0.safetensors has "),
    ({"shape": [2**40, 2**40]}, "is not a valid count"),
    ({"shape": 5}, "5 is not a shape"),
], ids=str)  # fmt: skip
def test_an_invalid_tensors_json_is_rejected(run, change, message):
    change_table(run, change)
    with pytest.raises(ValueError, match=rf"cannot read .*tensors.json: .*{message}"):
        loaded_step(find_checkpoint(str(run)))


@pytest.mark.parametrize("change,message", [
    ({"file": "run.json"}, "cannot read .*run.json: it has .* bytes, and is incomplete or not a safetensors file"),
    ({"file": "rank-1-0.safetensors"}, "rank-1-0.safetensors does not have 'both' as tensors.json describes it$"),
    ({"dtype": "I32"}, "rank-0-0.safetensors does not have 'both' as tensors.json describes it$"),
], ids=str)  # fmt: skip
def test_a_tensors_json_that_does_not_fit_the_headers_is_rejected(run, change, message):
    change_table(run, change)
    with pytest.raises(ValueError, match=message):
        loaded_step(find_checkpoint(str(run)))


def change_table(run, change):
    write_json(newest(run) / "tensors.json", lambda saved: {**saved, "both": {**saved["both"], **change}}, False)
    update_checksums(newest(run))
