"""Calls to a real S3 server that fails, waits or hangs up: what is repeated, what is not, and for how long."""

import json
import os
import re
import socket
import sys
import time
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
    local_path,
    output_folder,
    read,
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
