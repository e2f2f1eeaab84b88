"""Uploads that are cut or refused: the file is there completely, or not at all."""

import random

import pytest

from moe_dualpipe.data.stores import StorageError, Url, info, store, upload_file
from tests.support.object_store import first

PART = 5 * 2**20  # the smallest that S3 accepts
SIZE = 3 * PART + 1234
URL = Url("s3://bucket/run/file.bin")
KEY = "run/file.bin"


@pytest.fixture(scope="module")
def content():
    return random.Random(3).randbytes(SIZE)


@pytest.fixture
def file(tmp_path, content, monkeypatch):
    monkeypatch.setattr(store, "PART", PART)
    path = tmp_path / "file.bin"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("size,parts", [(0, []), (PART, []), (SIZE, [1234, PART, PART, PART])])
def test_a_large_file_is_sent_in_parts_that_are_announced_and_repeated(s3, file, content, size, parts):
    file.write_bytes(content[:size])
    done = []
    upload_file(file, URL, announce=done.append)
    assert s3.content(KEY) == content[:size] and done == ["uploading file.bin"] * len(done)
    assert sorted(request.size for request in s3.requests if request.is_part) == parts
    assert len(done) == max(len(parts), size > 0) and (parts or len(s3.requests) == 1)
    s3.fault = first(3, "hang up", lambda request: request.is_part)
    upload_file(file, URL)
    assert s3.content(KEY) == content[:size]


def test_an_upload_whose_last_answer_was_lost_is_repeated(s3, file, content):
    """The server has completed it, but the connection was cut. The repeated call finds no such upload."""
    s3.fault = first(1, "cut", lambda request: request.method == "POST" and "uploadId=" in request.path)
    upload_file(file, URL)
    assert s3.content(KEY) == content


def test_an_upload_that_is_refused_is_one_line_and_leaves_nothing(s3, file):
    s3.fault = lambda request: 403 if "partNumber=3" in request.path else None
    with pytest.raises(StorageError, match=rf"^{URL}: access denied .*injected") as caught:
        upload_file(file, URL)
    assert "\n" not in str(caught.value) and info(URL) is None
    assert "Uploads" not in s3.client.list_multipart_uploads(Bucket="bucket")
