"""Copies of files on a store: shared, fresh and complete, and only for URLs."""

import random

import pytest

from moe_dualpipe.data.stores import (
    StorageError,
    Url,
    drop,
    exists,
    fetch,
    local_path,
    open_folder,
    staged_folder,
    store,
    url_of,
)
from moe_dualpipe.messages import printable
from tests.support.object_store import first

FOLDER = "s3://bucket/folder"


def test_small_files_are_copied_and_copies_follow_the_store(s3):
    s3.put("folder/a.json", b"1")
    s3.put("folder/large.safetensors", b"3" * 100)
    folder = local_path(FOLDER)
    open_folder(folder)
    assert {path.name for path in folder.glob("[!.]*")} == {"a.json"}
    assert exists(folder / "large.safetensors") and not exists(folder / "c.json")
    s3.put("folder/a.json", b"2")
    open_folder(folder)
    assert (folder / "a.json").read_bytes() == b"2"


def test_a_copy_is_made_once_in_parts_and_again_after_it_was_dropped(s3, monkeypatch):
    monkeypatch.setattr(store, "PART", 30)
    s3.put("folder/large.safetensors", content := random.Random(5).randbytes(100))
    path = local_path(FOLDER) / "large.safetensors"
    s3.fault = first(2, 503)
    for _ in range(2):
        assert fetch(path).read_bytes() == content
    assert s3.bytes_read == 100
    drop(path.parent, [path.name])
    assert not path.exists()
    with pytest.raises(ValueError, match=r"^s3://bucket/folder/large.safetensors does not match its checksum$"):
        fetch(path, crc32=0)
    assert not path.exists()
    with pytest.raises(StorageError, match="there is no such file"):
        fetch(path.with_name("none"))
    open_folder(path.parent)
    s3.put("folder/large.safetensors", content[::-1])
    with pytest.raises(StorageError, match=r"^s3://bucket/folder/large.safetensors was replaced while it was in use"):
        fetch(path)


@pytest.mark.usefixtures("s3")
def test_paths_below_a_folder_that_stands_for_a_url_are_shown_as_urls(tmp_path):
    staged, copies = staged_folder(Url(FOLDER), str(tmp_path)), local_path(FOLDER)
    assert staged != copies and local_path(FOLDER) == copies == local_path(str(staged))
    for folder in (staged, copies):
        assert str(url_of(folder / "a" / "b")) == f"{FOLDER}/a/b" == printable(folder / "a" / "b")


def test_a_folder_for_local_files_that_others_can_change_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("moe_dualpipe.data.stores.local_copies.tempfile.gettempdir", lambda: str(tmp_path))
    assert local_path("s3://bucket/private").is_dir()
    [folder] = tmp_path.iterdir()
    folder.chmod(0o777)
    with pytest.raises(ValueError, match=r"is not a private folder of this user: set TMPDIR to another folder"):
        local_path("s3://bucket/other")
