"""Object stores, with a real S3 server that fails, waits or hangs up: calls, copies, uploads and training data.

Of calls: what is repeated, what is not, and for how long.
"""

import json
import os
import random
import re
import socket
import sys
import time
from contextlib import suppress

import numpy as np
import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.data import load_data, prepare_data
from moe_dualpipe.data.stores import (
    Patience,
    StorageError,
    Url,
    delete,
    delete_folder,
    drop,
    exists,
    fetch,
    info,
    is_url,
    list_folder,
    local_copies,
    local_path,
    open_folder,
    output_folder,
    read,
    store,
    upload_file,
    url_of,
    write,
)
from moe_dualpipe.messages import describe, printable, quoted, with_shown_names
from tests.support.object_store import first, forget

FOLDER = Url("s3://bucket/some/folder")


def test_only_urls_of_stores_are_urls():
    for text in ("s3://bucket/run", "gs://b/r/", "hf://datasets/a/b"):
        assert is_url(text), text
    for text in ("runs/tiny", "/a/b", "file:///a/b", "C://x", "s3:/bucket/run", ""):
        assert not is_url(text), text
    assert (FOLDER / "a").name == "a" and (FOLDER / "a").parent == FOLDER == Url("s3://bucket/some/folder/")
    for text in ("s3://", "s3:///", "runs/tiny"):
        with pytest.raises(ValueError, match="names no bucket or folder"):
            Url(text)


def check_a_store(folder):
    write(folder / "a.txt", b"hello")
    write(folder / "below" / "b.txt", b"")
    entries = {name: (entry.size, entry.is_folder) for name, entry in list_folder(folder).items()}
    assert entries == {"a.txt": (5, False), "below": (0, True)}
    assert [read(folder / "a.txt", *part) for part in ((), (1, 3), (2, 2))] == [b"hello", b"el", b""]
    before = info(folder / "a.txt")
    write(folder / "a.txt", b"other")
    after = info(folder / "a.txt")
    assert before and after and before.stamp != after.stamp
    for _ in range(2):
        delete(folder / "a.txt")
    assert info(folder / "a.txt") is None and list_folder(folder / "nothing") == {}
    delete_folder(folder / "below", "b.txt")
    assert list_folder(folder) == {}


def test_files_are_written_listed_read_in_part_and_removed(s3, monkeypatch):
    """Google's XML interface is that of S3, but for the signatures, which the server does not check."""
    account = {"gcs_base_url": s3.endpoint, "disable_oauth": True}
    account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
    for url in (FOLDER, Url("gs://bucket/folder")):
        check_a_store(url)


@pytest.mark.usefixtures("s3")
def test_parts_cover_what_is_read_and_no_more(monkeypatch):
    monkeypatch.setattr(store, "PART", 3)
    write(FOLDER / "a.txt", b"0123456789ab")
    assert [*store.read_parts(FOLDER / "a.txt", 1, 9)] == [b"123", b"456", b"78"]


@pytest.mark.parametrize("fault", [500, 503, "cut", "hang up"])
@pytest.mark.quick("503", "cut")
def test_what_may_pass_is_repeated_after_growing_pauses(s3, fault):
    write(FOLDER / "a.txt", b"hello " * 1000)
    s3.requests.clear()
    s3.fault = first(3, fault)
    assert read(FOLDER / "a.txt", 0, 5000) == (b"hello " * 1000)[:5000]
    assert len(s3.requests) == 4


def test_a_call_that_hangs_is_repeated(s3):
    write(FOLDER / "a.txt", b"hello")
    s3.requests.clear()
    s3.fault = lambda _: time.sleep(1.0) if len(s3.requests) == 1 else None
    assert read(FOLDER / "a.txt", 0, 5, Patience(20.0, call=0.3)) == b"hello"
    assert len(s3.requests) == 2


def given_up(url, monkeypatch=None, **environment):
    """The error of one line, for a store that cannot be read."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    forget()
    with pytest.raises(StorageError) as caught:
        read(Url(url), 0, 1, Patience(0.5))
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"{url}: ")
    return str(caught.value).removeprefix(f"{url}: ")


@pytest.mark.parametrize("status,words", [
    (403, "access denied .*check the credentials"), (404, "there is no such file or folder"),
    (503, r"GET .*, after \d+ retries +- .* 503 .*: injected$"),
])  # fmt: skip
def test_an_error_of_the_server_is_one_line_and_is_repeated_if_it_may_pass(s3, status, words):
    s3.fault = lambda _: status
    assert re.match(words, given_up("s3://bucket/a"))
    assert (len(s3.requests) > 1) == (status == 503)


@pytest.mark.usefixtures("s3")
def test_what_cannot_be_reached_is_one_line(monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    for url, problem, environment in (
        ("s3://other-bucket/run", "there is no such bucket", {}),
        ("s3://bucket/x", f"GET {address}/bucket/x .*error sending request$", {"AWS_ENDPOINT_URL": address}),
        ("s3://bucket/x", "access denied .*credentials.*check the credentials", {
            "AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }),
        ("az://container/run", ".*ccount", {"AZURE_STORAGE_ACCOUNT_NAME": ""}),
    ):  # fmt: skip
        assert re.match(problem, given_up(url, monkeypatch, **environment)), url
    with pytest.raises(StorageError, match=r"unknown kind of URL 'foo'; choose from: s3, gs, az, hf"):
        info(Url("foo://bucket/x"))
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    assert re.match(r".*obstore.*: pip install 'moe-dualpipe\[cloud\]'$", given_up("s3://bucket/x"))
    for server in ("http://127.0.0.1:99999", "http://[::bad", "not a url", "http://", "ftp://x", "http://a b"):
        problem = f"AWS_ENDPOINT_URL={re.escape(server)} is not the address of a server: write, for example, https://"
        assert re.match(problem, given_up("s3://bucket/x", monkeypatch, AWS_ENDPOINT_URL=server))


def test_hf_is_read_through_its_own_library(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(StorageError, match=r"^hf://org/model: ") as caught:
        local_path("hf://org/model")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"^hf://org/out can only be read: write to a folder, s3://, gs:// or az://$"):
        output_folder("hf://org/out")


URLS = {
    "s3://me:hunter2@bucket/run": "s3://***@bucket/run",
    "s3://me:hunter2/with@both@bucket/run": "s3://***@bucket/run",
    "https://hunter2@host/data.jsonl": "https://***@host/data.jsonl",
    "https://host/a?X-Amz-Signature=hunter2&x=1": "https://host/a?X-Amz-Signature=***&x=1",
    "az://container/a?sv=2026&sig=hunter2%3D": "az://container/a?sv=2026&sig=***",
    "abfss://container@account.dfs.core.windows.net/a?access_token=hunter2":
        "abfss://container@account.dfs.core.windows.net/a?access_token=***",
}  # fmt: skip


def test_passwords_and_signatures_are_never_printed(capfd):
    for url, shown in URLS.items():
        for text in (printable(url), quoted(url), describe(ValueError(url)), with_shown_names(f"--out {url}")):
            assert shown in text and "hunter2" not in text
    for words in (
        ["generate", url := next(iter(URLS))], ["export", "run", "--out", url], ["eval", "run", "--data", url],
        ["data", "prepare", url, "--out", "none"], ["train", "--data", url, "--out", url], ["train", "--weights", url],
    ):  # fmt: skip
        with suppress(SystemExit):
            assert main(words) == 2
        captured = capfd.readouterr()
        assert captured.err.count("\n") == 1 and "hunter2" not in captured.out + captured.err, words


# ---- Copies of files on a store: shared, fresh and complete, and only for URLs ----


COPIED = "s3://bucket/folder"


def test_small_files_are_copied_and_copies_follow_the_store(s3):
    s3.put("folder/a.json", b"1")
    s3.put("folder/large.safetensors", b"3" * 100)
    folder = local_path(COPIED)
    open_folder(folder)
    assert {path.name for path in folder.glob("[!.]*")} == {"a.json"}
    assert exists(folder / "large.safetensors") and not exists(folder / "c.json")
    s3.put("folder/a.json", b"2")
    open_folder(folder)
    assert (folder / "a.json").read_bytes() == b"2"


def test_a_copy_is_made_once_in_parts_and_again_after_it_was_dropped(s3, monkeypatch):
    monkeypatch.setattr(store, "PART", 30)
    s3.put("folder/large.safetensors", content := random.Random(5).randbytes(100))
    path = local_path(COPIED) / "large.safetensors"
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
    staged, copies = output_folder(COPIED, str(tmp_path)), local_path(COPIED)
    assert staged != copies and local_path(COPIED) == copies == local_path(str(staged))
    for folder in (staged, copies):
        assert str(url_of(folder / "a" / "b")) == f"{COPIED}/a/b" == printable(folder / "a" / "b")


def test_a_folder_for_local_files_that_others_can_change_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("moe_dualpipe.data.stores.local_copies.tempfile.gettempdir", lambda: str(tmp_path))
    assert local_path("s3://bucket/private").is_dir()
    [folder] = tmp_path.iterdir()
    folder.chmod(0o777)
    with pytest.raises(ValueError, match=r"is not a private folder of this user: set TMPDIR to another folder"):
        local_path("s3://bucket/other")


# ---- Uploads that are cut or refused: the file is there completely, or not at all ----


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
    (tmp_path / "file.bin").write_bytes(content)
    return tmp_path / "file.bin"


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


# ---- Training data at a URL: the same batches as from a folder, copied once for all ranks of a machine ----


SEQ_LEN = 32


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder as `moe-dualpipe data prepare` writes it, a bare file of token ids, and some texts."""
    base = tmp_path_factory.mktemp("data")
    (base / "texts").mkdir()
    for i in range(3):
        (base / "texts" / f"{i}.md").write_text(f"text {i} " * 400)
    (base / "texts" / "rows.jsonl").write_text('{"text": "a row of text"}\n' * 300)
    prepare_data([str(base / "texts" / "*.md")], base / "corpus", "bytes", 1, "text")
    np.random.default_rng(1).integers(0, 256, 100_000).astype("<u1").tofile(base / "bare.bin")
    return base


@pytest.fixture
def stored(corpus, s3):
    s3.put_folder(corpus, "data")
    s3.reset_faults()
    return s3


def load(source):
    return load_data(source, SEQ_LEN, dtype="uint8")


def batches(text):
    return [text.batch(7, step, 3, SEQ_LEN)[0] for step in range(3)] + [text.held_out_batch(0, 4, 4, SEQ_LEN)[0]]


@pytest.mark.parametrize("name", ["corpus", "bare.bin", "texts/rows.jsonl", "texts"])
def test_a_url_gives_the_batches_of_the_same_files_in_a_folder(corpus, stored, name):
    local, remote = load(f"{corpus}/{name}=2"), load(f"s3://bucket/data/{name}=2")
    assert all(one.equal(other) for one, other in zip(batches(local), batches(remote), strict=True))
    assert local.fingerprint() == remote.fingerprint()
    assert remote.description.replace("s3://bucket/data", str(corpus)) == local.description
    read = stored.bytes_read
    load(f"s3://bucket/data/{name}")
    assert stored.bytes_read == read > 0  # nothing is copied again


@pytest.mark.parametrize("source,message", [
    ("s3://bucket/data/none", r"^--data s3://bucket/data/none: there is no such file$"),
    ("s3://other/texts", r"^--data s3://other/texts: there is no such bucket"),
    ("s3://bucket/data/*.md", r"there is no such file$"),
])  # fmt: skip
@pytest.mark.usefixtures("stored")
def test_what_cannot_be_read_is_one_line(source, message):
    with pytest.raises(ValueError, match=message) as caught:
        load(source)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_one_line_that_says_where_the_copies_are(s3, monkeypatch):
    s3.put("fresh/train.bin", b"123")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local_copies, "read_parts", full)
    with pytest.raises(ValueError, match=r"^--data s3://bucket/fresh cannot be copied: No space .*TMPDIR"):
        load("s3://bucket/fresh")


@pytest.mark.parametrize("arguments", [
    ["prepare", "s3://bucket/notes", "--out", "corpus"], ["prepare", "notes", "--out", "s3://bucket/corpus"],
    ["check", "s3://bucket/corpus/train.bin"],
])  # fmt: skip
def test_commands_for_local_files_refuse_urls(arguments, refused):
    assert "is a URL: this command reads and writes local files only" in refused("data", *arguments)
