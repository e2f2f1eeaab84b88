"""Parts of files on a store: exact, and never of another file."""

import random

import pytest

from moe_dualpipe.data.stores import RangedFile, local_path, store
from tests.support.object_store import first

SIZE, PART = 10_000, 3000
KEY = "data/train.bin"


@pytest.fixture
def content(s3, monkeypatch):
    monkeypatch.setattr(store, "PART", PART)
    data = random.Random(5).randbytes(SIZE)
    s3.put(KEY, data)
    s3.requests.clear()
    return data


def open_file():
    return RangedFile(local_path("s3://bucket/data") / "train.bin")


def test_any_part_is_read_exactly(s3, content):
    file = open_file()
    for start, size in [(0, 0), (0, 1), (PART - 1, 2), (17, 3 * PART), (SIZE - 5, 5), (0, SIZE)]:
        assert file.read(start, size) == content[start : start + size]
    assert s3.bytes_read == 1 + 2 + 3 * PART + 5 + SIZE, "more is read than was asked for"


def test_errors_that_pass_are_repeated_and_others_are_one_line(s3, content):
    file = open_file()
    s3.fault = first(2, 503)
    assert file.read(0, 5) == content[:5]
    s3.fault = lambda _: 403
    for start in (9, 7):
        with pytest.raises(ValueError, match=r"^s3://bucket/data/train.bin: access denied .*injected") as caught:
            file.read(start, 5)
        assert "\n" not in str(caught.value)
    s3.fault = lambda _: None
    assert file.read(7, 5) == content[7:12]


def test_no_byte_of_a_file_that_was_replaced_is_read(s3, content):
    file = open_file()
    assert file.read(0, 5) == content[:5]
    s3.put(KEY, content[::-1])  # the same size
    with pytest.raises(ValueError, match=r"^s3://bucket/data/train.bin was replaced while it was in use"):
        file.read(0, 5)
    assert open_file().read(0, 5) == content[::-1][:5]
