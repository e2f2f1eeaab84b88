"""Kinds of stores other than S3, as far as there is a server: their requests and their errors."""

import json

import pytest

from moe_dualpipe.data.stores import (
    StorageError,
    Url,
    info,
    is_url,
    list_folder,
    local_path,
    output_folder,
    read,
    write,
)
from tests.support.object_store import forget


def check(folder):
    write(folder / "a.txt", b"hello")
    write(folder / "below" / "b.txt", b"")
    assert read(folder / "a.txt", 1, 3) == b"el" and info(folder / "none") is None
    assert {name: entry.is_folder for name, entry in list_folder(folder).items()} == {"a.txt": False, "below": True}


def test_gs_speaks_with_a_server(s3, monkeypatch):
    """Google's XML interface is that of S3, but for the signatures, which the server does not check."""
    account = {"gcs_base_url": s3.endpoint, "disable_oauth": True}
    account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
    check(Url("gs://bucket/folder"))
    assert s3.names() == ["folder/a.txt", "folder/below/b.txt"]


def test_memory_is_a_store():
    check(Url("memory://kinds/folder"))


@pytest.mark.parametrize("name", ["hf://org/model", "hf://datasets/org/name/*.jsonl"])
def test_hf_is_read_through_its_own_library(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(StorageError) as caught:
        local_path(name)
    assert str(caught.value).startswith(f"{name}: ") and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"^hf://org/out can only be read: write to a folder, s3://, gs:// or az://$"):
        output_folder("hf://org/out")
    assert is_url(name)


def test_az_without_an_account_is_one_line(monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    forget()
    with pytest.raises(StorageError, match=r"^az://container/run: .*ccount") as caught:
        info(Url("az://container/run"))
    assert "\n" not in str(caught.value)
