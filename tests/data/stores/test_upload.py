"""Uploads that are cut or killed: the next one sends only what is missing."""

import os
import random
import signal
import time

import pytest

from moe_dualpipe.data.stores import Patience, StorageError, Url, abort_uploads, info, upload_file
from tests.support import ranks
from tests.support.object_store import access, first, slow

MB = 2**20
PART = 5 * MB  # the smallest that S3 accepts
SIZE = 3 * PART + 1234
URL = Url("s3://bucket/run/file.bin")
KEY = "run/file.bin"


@pytest.fixture(scope="module")
def content():
    return random.Random(3).randbytes(SIZE)


@pytest.fixture
def file(tmp_path, content):
    path = tmp_path / "file.bin"
    path.write_bytes(content)
    return path


def sent_parts(s3):
    return [request.size for request in s3.requests if request.is_part]


def test_a_large_file_is_sent_in_parts_and_not_again(s3, file, content):
    done = []
    assert upload_file(file, URL, announce=done.append, part_bytes=PART) == SIZE
    assert s3.content(KEY) == content and sorted(sent_parts(s3)) == [1234, PART, PART, PART]
    assert done == ["uploading file.bin"] * 5
    assert upload_file(file, URL, part_bytes=PART) == 0
    assert len(sent_parts(s3)) == 4
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # the same size
    assert upload_file(file, URL, part_bytes=PART) == SIZE
    assert s3.content(KEY) == file.read_bytes()


@pytest.mark.parametrize("size", [0, 1, PART])
def test_a_small_file_is_one_request_and_not_sent_again(s3, tmp_path, content, size):
    path = tmp_path / "small"
    path.write_bytes(content[:size])
    assert upload_file(path, URL, part_bytes=PART) == size
    assert s3.content(KEY) == content[:size]
    assert [request.method for request in s3.requests].count("PUT") == 1
    upload_file(path, URL, part_bytes=PART)
    assert [request.method for request in s3.requests].count("PUT") == 1


def test_only_the_missing_parts_of_an_upload_that_failed_are_sent(s3, file, content):
    s3.fault = lambda request: 403 if "partNumber=3" in request.path else None
    with pytest.raises(StorageError, match="access denied"):
        upload_file(file, URL, part_bytes=PART)
    there = sum(size > 0 for size in sent_parts(s3)) - 1
    assert info(URL) is None and 1 <= there <= 3
    s3.requests.clear()
    s3.fault = lambda _: None
    sent = upload_file(file, URL, part_bytes=PART)
    assert s3.content(KEY) == content and len(sent_parts(s3)) == 4 - there
    assert sent == sum(sent_parts(s3)) < SIZE


def test_parts_of_another_content_are_sent_again(s3, file, content):
    s3.fault = lambda request: 403 if request.method == "POST" and "uploadId" in request.path else None
    with pytest.raises(StorageError):
        upload_file(file, URL, part_bytes=PART)
    s3.reset_faults()
    changed = bytes([content[0] ^ 1]) + content[1:]
    file.write_bytes(changed)
    assert upload_file(file, URL, part_bytes=PART) == PART
    assert s3.content(KEY) == changed


def test_an_upload_whose_last_answer_was_lost_is_complete(s3, file, content):
    """The server has completed it, but the connection was cut. The repeated call finds no such upload."""
    s3.fault = first(1, "cut", lambda request: request.method == "POST" and "uploadId=" in request.path)
    assert upload_file(file, URL, part_bytes=PART) == SIZE
    assert s3.content(KEY) == content


def test_parts_whose_connection_is_cut_are_repeated(s3, file, content):
    s3.fault = first(2, "hang up", lambda request: request.is_part)
    upload_file(file, URL, part_bytes=PART)
    assert s3.content(KEY) == content and len(sent_parts(s3)) == 6


def upload_in_process(environment, path):
    os.environ.update(environment)
    upload_file(path, URL, Patience(60.0), part_bytes=PART)


def test_only_the_missing_parts_of_an_upload_that_was_killed_are_sent(s3, file, content):
    wait = slow(60.0, lambda request: "partNumber=2&" in request.path + "&")
    s3.fault = wait
    process = ranks._context.Process(target=upload_in_process, args=(access(s3), file))
    process.start()
    while len(sent_parts(s3)) < 4:
        assert process.is_alive()
        time.sleep(0.01)
    upload = s3.client().list_multipart_uploads(Bucket="bucket")["Uploads"][0]["UploadId"]
    while len(s3.client().list_parts(Bucket="bucket", Key=KEY, UploadId=upload).get("Parts", [])) < 3:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert info(URL) is None
    s3.reset_faults()
    assert upload_file(file, URL, part_bytes=PART) == PART
    assert s3.content(KEY) == content


def test_the_parts_of_abandoned_uploads_are_removed(s3, file):
    s3.fault = lambda request: 403 if "partNumber=4" in request.path else None
    with pytest.raises(StorageError):
        upload_file(file, URL, part_bytes=PART)
    abort_uploads(Url("s3://bucket/ru"))
    assert len(s3.client().list_multipart_uploads(Bucket="bucket")["Uploads"]) == 1
    abort_uploads(URL.parent)
    assert "Uploads" not in s3.client().list_multipart_uploads(Bucket="bucket")


def test_other_stores_get_whole_files(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"hello")
    url = Url("memory://uploads/a")
    assert upload_file(path, url) == 5
    assert (found := info(url)) and found.size == 5
