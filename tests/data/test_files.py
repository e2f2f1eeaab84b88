"""Training data in files that change or disappear while they are read."""

import os
from pathlib import Path

import numpy as np
import pytest

from moe_dualpipe.data import DataFile, files, load_data


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """A folder with 40,000 token ids for training and 4,000 held out, 10 pages and one."""
    (np.arange(40_000) % 251).astype("<u2").tofile(tmp_path / "train.bin")
    (np.arange(4_000) % 241).astype("<u2").tofile(tmp_path / "held_out.bin")
    return tmp_path


CHANGES = {
    "shorter": (lambda path: os.truncate(path, 4096), r"\(\d+ bytes then, 4096 now\)"),
    "longer": (lambda path: path.open("ab").write(b"\0\0"), r"\(\d+ bytes then, \d+ now\)"),
    "rewritten": (
        lambda path: path.write_bytes(bytes(path.stat().st_size)) and os.utime(path, ns=(0, 1)),
        r"\(\d+ byt",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_token_file_that_changes_in_place_is_named_when_a_batch_is_read(tokens, change):
    text, (apply, sizes) = load_data(str(tokens), 8), CHANGES[change]
    apply(tokens / "held_out.bin")
    text.batch(0, 0, 4, 8)  # the other file is as it was
    with pytest.raises(ValueError, match=f"{tokens}/held_out.bin was written to while it was in use {sizes}"):
        text.held_out_batch(0, 4, 4, 8)


def test_a_token_file_that_is_replaced_or_removed_stays_open_until_it_is_not_needed(tokens):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    text = load_data(str(tokens), 8)
    assert descriptors() == before + 2
    batch = text.batch(0, 5, 64, 8)[0]
    (tokens / "new").write_bytes(b"\7\0" * 9)
    (tokens / "new").replace(tokens / "train.bin")
    assert text.batch(0, 5, 64, 8)[0].equal(batch)
    (tokens / "train.bin").unlink()
    assert text.batch(0, 5, 64, 8)[0].equal(batch)
    del text
    assert descriptors() == before


def test_reads_are_complete_or_an_error_that_names_the_file(tmp_path, monkeypatch):
    path, preadv, buffer = tmp_path / "a", os.preadv, bytearray(50)
    path.write_bytes(bytes(range(100)))

    def some_bytes(descriptor, buffers, first):
        if first > 60:
            raise OSError(5, "Input/output error")
        return preadv(descriptor, [buffers[0][:7]], first)

    with DataFile(path) as file:
        monkeypatch.setattr(files.os, "preadv", some_bytes)
        file.read_into(3, memoryview(buffer))
        assert buffer == file.read(3, 50) == bytes(range(3, 53))
        with pytest.raises(ValueError, match=f"cannot read {path} at byte 61: Input/output error"):
            file.read(12, 60)
        monkeypatch.undo()
        with pytest.raises(ValueError, match=f"cannot read {path}: it ends at byte 100"):
            file.read(90, 20)
        os.truncate(path, 60)
        with pytest.raises(ValueError, match=rf"{path} was written to while it was in use \(100 bytes then, 60 now\)"):
            file.read_into(50, memoryview(buffer))
