"""Local copies of files on a store: fresh, shared, removed, and only for URLs."""

import pytest

from moe_dualpipe.data import stores
from moe_dualpipe.data.stores import (
    StorageError,
    Url,
    drop,
    exists,
    fetch,
    local_path,
    open_folder,
    staged_folder,
    url_of,
)
from moe_dualpipe.messages import printable

FOLDER = "s3://bucket/folder"


def test_small_files_are_copied_and_copies_follow_the_store(s3):
    s3.put("folder/a.json", b"1")
    s3.put("folder/b.json", b"2")
    s3.put("folder/large.safetensors", b"3" * 100)
    folder = local_path(FOLDER)
    open_folder(folder)
    assert {path.name for path in folder.glob("[!.]*")} == {"a.json", "b.json"}
    assert exists(folder / "large.safetensors") and not exists(folder / "c.json")
    s3.put("folder/a.json", b"11")
    s3.client().delete_object(Bucket="bucket", Key="folder/b.json")
    open_folder(folder)
    assert (folder / "a.json").read_bytes() == b"11"
    assert not (folder / "b.json").exists() and not exists(folder / "b.json")


def test_a_copy_is_made_once_and_again_after_it_was_dropped(s3):
    s3.put("folder/large.safetensors", b"3" * 100)
    path = local_path(FOLDER) / "large.safetensors"
    for _ in range(2):
        assert fetch(path).read_bytes() == b"3" * 100
    assert sum(request.method == "GET" and "?" not in request.path for request in s3.requests) == 1
    drop(path.parent, [path.name])
    assert not path.exists()
    with pytest.raises(ValueError, match=r"^s3://bucket/folder/large.safetensors does not match its checksum$"):
        fetch(path, crc32=0)
    assert not path.exists()
    with pytest.raises(StorageError, match="there is no such file"):
        fetch(path.with_name("none"))


@pytest.mark.parametrize("damaged", [b"", b"3" * 99, b"3" * 99 + b"4"])
def test_a_copy_that_was_cut_or_changed_is_made_again(s3, damaged):
    s3.put("folder/a.json", b"3" * 100)
    path = local_path(FOLDER) / "a.json"
    for copy in (lambda: open_folder(path.parent), lambda: fetch(path)):
        copy()
        path.write_bytes(damaged)
        copy()
        assert path.read_bytes() == b"3" * 100


@pytest.mark.usefixtures("s3")
def test_paths_below_a_folder_that_stands_for_a_url_are_shown_as_urls(tmp_path):
    staged, copies = staged_folder(Url(FOLDER), str(tmp_path)), local_path(FOLDER, str(tmp_path))
    assert staged != copies and local_path(FOLDER) == copies
    for folder in (staged, copies):
        assert str(url_of(folder / "a" / "b")) == f"{FOLDER}/a/b" == printable(folder / "a" / "b")
    assert local_path(str(staged)) == copies
    assert url_of(tmp_path) is None and url_of(tmp_path / "x") is None


def test_local_paths_never_reach_the_store(tmp_path, monkeypatch):
    monkeypatch.setattr(stores.store, "call", None)
    (tmp_path / "a").write_bytes(b"12")
    assert local_path(str(tmp_path)) == tmp_path and local_path(f"file://{tmp_path}") == tmp_path
    open_folder(tmp_path)
    drop(tmp_path, ["a"])
    assert fetch(tmp_path / "a") == tmp_path / "a" and exists(tmp_path / "a") and not exists(tmp_path / "b")
    assert stores.size_of(tmp_path / "a") is None and stores.sizes_of(tmp_path) == {"a": 2}


def test_a_folder_for_local_files_that_others_can_change_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("moe_dualpipe.data.stores.local_copies.tempfile.gettempdir", lambda: str(tmp_path))
    assert local_path("s3://bucket/private").is_dir()
    [folder] = tmp_path.iterdir()
    folder.chmod(0o777)
    with pytest.raises(ValueError, match=r"is not a private folder of this user: name another staging folder"):
        local_path("s3://bucket/other")
