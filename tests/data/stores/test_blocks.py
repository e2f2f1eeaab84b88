"""The cache of blocks: its size, its order, several processes, and reads that wait or do not."""

import os
import random
import time

import pytest

from moe_dualpipe.data.stores import BLOCK, BlockCache, RemoteFile, Url
from moe_dualpipe.data.stores.local_copies import locked
from tests.support import ranks
from tests.support.object_store import access, first, slow

SIZE = 5 * BLOCK + 1000
KEY, URL = "data/train.bin", Url("s3://bucket/data/train.bin")


@pytest.fixture(scope="module")
def content():
    return random.Random(5).randbytes(SIZE)


@pytest.fixture
def stored(s3, content):
    s3.put(KEY, content)
    s3.requests.clear()
    return s3


def open_file(folder, limit=100 * BLOCK):
    return RemoteFile(URL, folder / "train.bin", BlockCache(folder / "cache", limit))


def settle(file):
    """Wait until nothing is being read."""
    while file._coming:
        time.sleep(0.001)


def reads(s3):
    return sum(request.method == "GET" for request in s3.requests)


def test_any_part_is_read_exactly(stored, content, tmp_path):
    file = open_file(tmp_path)
    for start, size in [(0, 0), (0, 1), (BLOCK - 1, 2), (17, 3 * BLOCK), (SIZE - 5, 5), (0, SIZE)]:
        assert file.read(start, size) == content[start : start + size]
    assert reads(stored) == 6 and file.waits == 5
    again = open_file(tmp_path)
    assert again.read(0, SIZE) == content and again.waits == 0 and reads(stored) == 6


def test_what_is_read_ahead_does_not_wait(stored, content, tmp_path):
    stored.fault = slow(0.05)
    file = open_file(tmp_path)
    file.read_ahead([(10, 20), (2 * BLOCK - 1, 2), (30, 5)])
    settle(file)
    assert reads(stored) == 3
    assert file.read(10, 20) == content[10:30] and file.read(2 * BLOCK - 1, 2) == content[2 * BLOCK - 1 : 2 * BLOCK + 1]
    assert file.waits == 0
    file.read(4 * BLOCK, 1)
    assert file.waits == 1


def test_a_read_joins_one_that_is_on_its_way(stored, tmp_path):
    stored.fault = slow(0.2)
    file = open_file(tmp_path)
    file.read_ahead([(0, 10)])
    file.read(5, 10)
    assert file.waits == 1 and reads(stored) == 1


def test_errors_that_pass_are_repeated_and_others_are_one_line(stored, content, tmp_path):
    file = open_file(tmp_path)
    stored.fault = first(2, 503)
    assert file.read(0, 5) == content[:5]
    stored.fault = lambda _: 403
    with pytest.raises(ValueError, match=r"^s3://bucket/data/train.bin: access denied"):
        file.read(BLOCK, 5)
    stored.fault = lambda _: None
    assert file.read(BLOCK, 5) == content[BLOCK : BLOCK + 5]


def test_the_least_recently_used_blocks_are_removed(tmp_path):
    cache = BlockCache(tmp_path, 10 * 100)
    for block in range(10):
        cache.put("file", block, bytes([block]) * 100)
    assert cache.get("file", 0, 3, 5) == b"\0\0"  # used now
    cache.put("file", 10, b"x" * 100)
    left = {block for block in range(11) if cache.has("file", block)}
    assert {0, 9, 10} <= left and 1 not in left
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= 1000
    assert cache.get("file", 1, 0, 1) is None


def fill(folder, name):
    cache = BlockCache(folder, 20 * 1000)
    for block in range(60):
        cache.put(name, block, bytes(1000))
        with locked(folder / ".lock"):
            assert sum(path.stat().st_size for path in folder.glob("*/*")) <= 20 * 1000


@pytest.mark.long
def test_several_processes_share_the_limit(tmp_path):
    processes = [ranks._context.Process(target=fill, args=(tmp_path, f"file{i}")) for i in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]


def test_a_file_that_is_larger_than_the_cache_is_read(stored, content, tmp_path):
    file = open_file(tmp_path, limit=2 * BLOCK)
    for _ in range(2):
        assert file.read(0, SIZE) == content
    assert reads(stored) > 6


def read_all(environment, folder):
    os.environ.update(environment)
    file = open_file(folder)
    for block in range(6):
        file.read(block * BLOCK, 10)


def test_processes_of_a_machine_read_each_block_once(stored, tmp_path):
    stored.fault = slow(0.05)
    processes = [ranks._context.Process(target=read_all, args=(access(stored), tmp_path)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0] and reads(stored) == 6


def test_a_file_that_was_replaced_is_another_file(stored, content, tmp_path, monkeypatch):
    file = open_file(tmp_path)
    file.read(0, 5)
    stored.put(KEY, content[::-1])
    assert open_file(tmp_path).read(0, 5) == content[::-1][:5]
    file.check_unchanged()
    monkeypatch.setattr("moe_dualpipe.data.stores.blocks._CHECK_SECONDS", 0.0)
    file.read(BLOCK, 5)
    with pytest.raises(ValueError, match="was replaced while it was in use: do not change data in place"):
        file.check_unchanged()
