"""Parts of files on a store: exact, read ahead or waited for, and never of another file."""

import random

import pytest

from moe_dualpipe.data.stores import RangedFile, RemoteFile, local_path, store
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


def open_file(kind=RemoteFile):
    return kind(local_path("s3://bucket/data") / "train.bin")


@pytest.mark.parametrize("kind", [RangedFile, RemoteFile])
def test_any_part_is_read_exactly(s3, content, kind):
    file = open_file(kind)
    for start, size in [(0, 0), (0, 1), (PART - 1, 2), (17, 3 * PART), (SIZE - 5, 5), (0, SIZE)]:
        assert file.read(start, size) == content[start : start + size]
    assert s3.bytes_read == 1 + 2 + 3 * PART + 5 + SIZE, "more is read than was asked for"


def test_what_is_read_ahead_does_not_wait_and_is_read_once(s3, content):
    file = open_file()
    wanted = [(10, 20), (PART - 1, 2), (5000, 500)]
    for future in [*file.read_ahead(wanted), *file.read_ahead(wanted)]:
        future.result()
    assert [file.read(*part) for part in wanted] == [content[first : first + size] for first, size in wanted]
    assert file.waits == 0 and sum(request.method == "GET" for request in s3.requests) == 3
    assert file.read(*wanted[0]) == content[10:30] and file.waits == 1


def test_errors_that_pass_are_repeated_and_others_are_one_line(s3, content):
    file = open_file()
    s3.fault = first(2, 503)
    assert file.read(0, 5) == content[:5]
    s3.fault = lambda _: 403
    for read in (lambda: file.read(9, 5), lambda: file.read_ahead([(7, 5)])[0].result(), lambda: file.read(7, 5)):
        with pytest.raises(ValueError, match=r"^s3://bucket/data/train.bin: access denied .*injected") as caught:
            read()
        assert "\n" not in str(caught.value)
    s3.fault = lambda _: None
    assert file.read(7, 5) == content[7:12]


@pytest.mark.parametrize("kind", [RangedFile, RemoteFile])
def test_no_byte_of_a_file_that_was_replaced_is_read(s3, content, kind):
    file = open_file(kind)
    assert file.read(0, 5) == content[:5]
    s3.put(KEY, content[::-1])  # the same size
    with pytest.raises(ValueError, match=r"^s3://bucket/data/train.bin was replaced while it was in use"):
        file.read(0, 5)
    assert open_file(kind).read(0, 5) == content[::-1][:5]
