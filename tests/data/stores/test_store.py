"""Calls to a real S3 server that fails, waits or hangs up: what is repeated, what is not, and for how long."""

import os
import socket
import sys
from contextlib import suppress

import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.data.stores import (
    Patience,
    StorageError,
    Url,
    delete,
    delete_folder,
    info,
    is_url,
    list_folder,
    read,
    write,
)
from moe_dualpipe.messages import describe, printable, quoted, with_shown_names
from tests.support.object_store import first, forget, slow

FOLDER = Url("s3://bucket/some/folder")


def test_only_urls_of_stores_are_urls():
    for text in ("s3://bucket/run", "gs://b/r/", "memory://run", "hf://datasets/a/b"):
        assert is_url(text), text
    for text in ("runs/tiny", "/a/b", "file:///a/b", "C://x", "s3:/bucket/run", ""):
        assert not is_url(text), text
    assert (FOLDER / "a").name == "a" and (FOLDER / "a").parent == FOLDER == Url("s3://bucket/some/folder/")
    for text in ("s3://", "s3:///", "runs/tiny"):
        with pytest.raises(ValueError, match="names no bucket or folder"):
            Url(text)


def test_files_are_written_listed_read_in_part_and_removed(s3):
    write(FOLDER / "a.txt", b"hello")
    write(FOLDER / "below" / "b.txt", b"")
    assert s3.content("some/folder/a.txt") == b"hello"
    entries = list_folder(FOLDER)
    assert {name: (entry.size, entry.is_folder) for name, entry in entries.items()} == {
        "a.txt": (5, False), "below": (0, True),
    }  # fmt: skip
    assert read(FOLDER / "a.txt") == b"hello" and read(FOLDER / "a.txt", 1, 3) == b"el"
    assert read(FOLDER / "a.txt", 2, 2) == b""
    before = info(FOLDER / "a.txt")
    write(FOLDER / "a.txt", b"other")
    after = info(FOLDER / "a.txt")
    assert before and after and before.stamp != after.stamp
    delete(FOLDER / "a.txt")
    delete(FOLDER / "a.txt")
    assert info(FOLDER / "a.txt") is None and list_folder(FOLDER / "nothing") == {}
    delete_folder(FOLDER / "below", "b.txt")
    assert s3.names() == []


@pytest.mark.parametrize("fault", [500, 503, "cut", "hang up"])
@pytest.mark.quick("503", "cut")
def test_what_may_pass_is_repeated_after_growing_pauses(s3, fault):
    write(FOLDER / "a.txt", b"hello " * 1000)
    s3.requests.clear()
    s3.fault = first(3, fault)
    assert read(FOLDER / "a.txt", 0, 5000) == (b"hello " * 1000)[:5000]
    assert len(s3.requests) == 4


def test_an_answer_that_is_too_short_is_an_error(s3):
    s3.put("some/folder/a.txt", b"hello")
    with pytest.raises(StorageError, match=r"^s3://bucket/some/folder/a.txt: got 5 of 9 bytes$"):
        read(FOLDER / "a.txt", 0, 9, Patience(0.5))


def test_a_call_that_hangs_is_repeated(s3):
    write(FOLDER / "a.txt", b"hello")
    s3.requests.clear()
    hang = slow(1.0)
    s3.fault = lambda request: hang(request) if len(s3.requests) == 1 else None
    assert read(FOLDER / "a.txt", 0, 5, Patience(20.0, call=0.3)) == b"hello"
    assert len(s3.requests) == 2


def test_a_store_that_stays_away_is_given_up(s3):
    s3.fault = lambda _: 503
    with pytest.raises(
        StorageError, match=r"^s3://bucket/some/folder/a: GET .*, after \d+ retries +- .* 503 .*: injected$"
    ):
        read(FOLDER / "a", 0, 5, Patience(1.0))
    assert len(s3.requests) >= 2


@pytest.mark.parametrize(
    "status,words", [(403, "access denied .*check the credentials"), (404, "no such file"), (401, "access denied")]
)
def test_what_will_not_pass_is_not_repeated(s3, status, words):
    s3.fault = lambda _: status
    with pytest.raises(StorageError, match=words) as caught:
        read(FOLDER / "a", 0, 5)
    assert len(s3.requests) == 1 and "\n" not in str(caught.value)


@pytest.mark.usefixtures("s3")
def test_a_missing_bucket_is_told_from_an_empty_folder():
    with pytest.raises(StorageError, match=r"^s3://other-bucket/run: there is no such bucket"):
        list_folder(Url("s3://other-bucket/run"))


def test_without_credentials_the_error_is_one_line(s3, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    forget()
    with pytest.raises(StorageError, match=r"^s3://bucket/x: access denied .*credentials.*check the credentials"):
        read(Url("s3://bucket/x"), 0, 1)
    assert not s3.requests


@pytest.mark.usefixtures("s3")
def test_an_unreachable_server_is_given_up_in_time(monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    forget()
    with pytest.raises(StorageError, match=rf"^s3://bucket/x: HEAD {address}/bucket/x .*error sending request$"):
        info(Url("s3://bucket/x"), Patience(1.0))


def test_a_missing_package_and_an_unknown_kind_of_url_say_what_to_do(monkeypatch):
    with pytest.raises(StorageError, match=r"unknown kind of URL 'foo'; choose from: s3, gs, az, hf, memory"):
        info(Url("foo://bucket/x"))
    forget()
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(StorageError, match=r"^s3://bucket/x: .*obstore.*: pip install 'moe-dualpipe\[cloud\]'$"):
        info(Url("s3://bucket/x"))
    forget()


@pytest.mark.parametrize("url,shown", [
    ("s3://me:hunter2@bucket/run", "s3://***@bucket/run"),
    ("s3://me:hunter2/with@both@bucket/run", "s3://***@bucket/run"),
    ("https://hunter2@host/data.jsonl", "https://***@host/data.jsonl"),
    ("https://host/a?X-Amz-Signature=hunter2&x=1", "https://host/a?X-Amz-Signature=***&x=1"),
    ("az://container/a?sv=2026&sig=hunter2%3D", "az://container/a?sv=2026&sig=***"),
    ("abfss://container@account.dfs.core.windows.net/a?access_token=hunter2",
     "abfss://container@account.dfs.core.windows.net/a?access_token=***"),
])  # fmt: skip
def test_passwords_and_signatures_are_never_printed(url, shown, capfd):
    for text in (printable(url), quoted(url), describe(ValueError(f"{url}: wrong")), with_shown_names(f"--out {url}")):
        assert shown in text and "hunter2" not in text
    commands = (
        ["generate", url], ["export", "run", "--out", url], ["eval", "run", "--data", url], ["plot", url],
        ["data", "prepare", url, "--out", "none"], ["train", "--data", url, "--out", url], ["train", "--resume", url],
        ["train", "--weights", url], [url],
    )  # fmt: skip
    for words in commands:
        with suppress(SystemExit):
            assert main(words) == 2
        captured = capfd.readouterr()
        assert captured.err.count("\n") == 1 and "hunter2" not in captured.out + captured.err, words


def test_the_password_of_a_server_is_never_printed(s3, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint.replace("://", "://me:hunter2@"))
    forget()
    s3.fault = lambda _: 403
    with pytest.raises(StorageError) as caught:
        read(Url("s3://bucket/x"), 0, 1)
    assert "hunter2" not in describe(caught.value) and "***@127.0.0.1" in describe(caught.value)
