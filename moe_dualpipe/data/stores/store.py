"""Addresses on an object store, and calls by obstore: it retries after temporary errors, and sends files in parts.

obstore does not know hf:// (see local_copies.py). A store may never answer, so calls are in threads that end with the
process, whatever they wait for.
"""

import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from ...messages import printable, quoted, unknown_name

# ---- Addresses ----

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)


def is_url(text: object) -> bool:
    """Whether `text` is a URL such as s3://bucket/run. A file:// URL is a local path."""
    match = _URL.fullmatch(str(text))
    return match is not None and match[1] not in ("file", "local")


class Url(str):
    """A URL without a slash at its end. `url / "name"` is below it.

    Raises ValueError for one without a path, and for one with a password: run.toml would keep it.
    """

    def __new__(cls, text: str) -> "Url":
        match = _URL.fullmatch(text)
        if match is None or not match[2].strip("/"):
            raise ValueError(f"{quoted(text)} names no bucket or folder: write, for example, s3://bucket/run")
        if ":" in match[2].partition("/")[0] and "@" in match[2]:
            raise ValueError(
                f"{quoted(text)} holds a password: remove it, and set it in the environment (docs/checkpoints.md)"
            )
        return super().__new__(cls, f"{match[1]}://{match[2].strip('/')}")

    @property
    def name(self) -> str:
        return self.rpartition("/")[2]

    @property
    def parent(self) -> "Url":
        return Url(self.rpartition("/")[0])

    def __truediv__(self, name: object) -> "Url":
        return Url(f"{self}/{name}")


# ---- Errors ----

_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_DENIED = re.compile(r"status code: 40[13] |None from session.get_credentials|PermissionDenied|Unauthenticated")
_LIBRARIES = ("obstore", "huggingface_hub", "httpx", "botocore")


class StorageError(OSError):
    """A store could not be read or written. The message is one line, and names the URL."""


class MissingError(StorageError):
    """There is no such file, folder or bucket."""


def storage_error(url: Url, error: Exception) -> StorageError | None:
    """Convert an error of a library into a StorageError; None if it is not about the store."""
    if isinstance(error, StorageError):
        return error
    if isinstance(error, ImportError):
        return StorageError(f"{url}: {printable(error)}: pip install 'moe-dualpipe[cloud]'")
    kind, reason = type(error).__name__, _reason(str(error))
    if any(code in str(error) for code in _NO_BUCKET):
        return MissingError(f"{url}: there is no such bucket")
    if isinstance(error, FileNotFoundError):
        return MissingError(f"{url}: there is no such file or folder")
    if kind == "PreconditionError":
        return StorageError(f"{url} was replaced while it was in use: do not change data in place; write another file")
    if _DENIED.search(f"{reason} {kind}"):
        return StorageError(
            f"{url}: access denied ({reason}): check the credentials of this process, and what they may read and write"
        )
    if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _LIBRARIES:
        return StorageError(f"{url}: {reason}")
    return None


def _reason(text: str) -> str:
    """The reason in a message of obstore: the request, the number of retries, and the answer without its XML."""
    text = text.partition("\n\nDebug source")[0].rpartition("Error performing ")[2]
    text = re.sub(r", max_retries: .*?(?= +- )", "", text)
    message = re.search(r"<Message>(.*?)</Message>", text)
    text = text.partition("<")[0].strip(" :")
    return printable(f"{text}: {message[1]}" if message else text, 300)


# ---- Calls ----

SCHEMES = ("s3", "gs", "az", "hf", "s3a", "abfs", "abfss")
PART = 8 * 2**20
"""Bytes of a request. A file of more than MAX_PARTS of these is sent in larger ones."""
MAX_PARTS = 10_000
_CONCURRENT = 4
_CONNECT = timedelta(seconds=10)
_ENDPOINTS = "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"
_SERVER = re.compile(r"https?://([\w.-]+|\[[0-9a-fA-F:]+\])(?::(\d{1,5}))?(/[!-~]*)?", re.ASCII)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits in seconds. total: for a request with its retries. call: for one attempt, with its data."""

    total: float
    call: float = 60.0


QUICK = Patience(20.0, 20.0)
"""For operations that a person waits for, such as the start of a run."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file or folder on a store. stamp: differs after the file was written again."""

    size: int
    stamp: str
    is_folder: bool = False


def call(url: Url, operation: Callable[[Any, str], Result], patience: Patience = QUICK) -> Result:
    """Return `operation(store, path)`. Raises StorageError, and the operation's own errors."""
    for name, server in ((name, os.environ.get(name)) for name in _ENDPOINTS):
        match = _SERVER.fullmatch(server or "http://default")
        if match is None or int(match[2] or 0) >= 2**16:  # obstore would panic, and print that
            raise StorageError(
                f"{url}: {name}={printable(server)} is not the address of a server: write, for example, "
                "https://s3.example.com:9000"
            )
    scheme, _, path = url.partition("://")
    bucket, _, key = path.partition("/")
    try:
        return call_in_thread(lambda: operation(_store(scheme, bucket, patience), key), "storage").result()
    except Exception as error:
        raise (storage_error(url, error) or error) from None


@cache
def _store(scheme: str, bucket: str, patience: Patience) -> Any:
    if scheme not in SCHEMES:
        raise StorageError(str(unknown_name("kind of URL", scheme, SCHEMES[:4])))
    from obstore.store import from_url

    options: dict[str, Any] = {}
    if scheme in ("s3", "s3a") and "AWS_ACCESS_KEY_ID" not in os.environ:  # profiles, roles and single sign-on
        from obstore.auth.boto3 import Boto3CredentialProvider

        options["credential_provider"] = Boto3CredentialProvider()
    limit, total = timedelta(seconds=patience.call), timedelta(seconds=patience.total)
    return from_url(
        f"{scheme}://{bucket}", client_options={"allow_http": True, "connect_timeout": _CONNECT, "timeout": limit},
        retry_config={"max_retries": 1000, "retry_timeout": total}, **options,
    )  # fmt: skip


def _entry(found: Mapping[str, Any]) -> StoredFile:
    stamp = found.get("e_tag") or str(found.get("last_modified"))
    return StoredFile(found["size"], stamp)


def list_folder(url: Url, patience: Patience = QUICK) -> dict[str, StoredFile]:
    """What is directly below a folder, by name; {} if it is empty. Raises StorageError, even for a missing bucket."""
    found = call(url, lambda store, path: store.list_with_delimiter(path), patience)
    files = {entry["path"]: _entry(entry) for entry in found["objects"]}
    folders = {path.strip("/"): StoredFile(0, "", is_folder=True) for path in found["common_prefixes"]}
    return {path.rpartition("/")[2]: entry for path, entry in (files | folders).items()}


def info(url: Url, patience: Patience = QUICK) -> StoredFile | None:
    """A file; None if there is none. Raises StorageError."""
    try:
        return _entry(call(url, lambda store, path: store.head(path), patience))
    except MissingError:
        return None


def read(url: Url, first: int = 0, stop: int | None = None, patience: Patience = QUICK, stamp: str = "") -> bytes:
    """The bytes of a file from `first` to `stop`. stamp: the one that the file must have. Raises StorageError."""
    if first == stop:
        return b""
    options: dict[str, Any] = {} if stop is None else {"range": (first, stop)}
    if stamp:
        options["if_match"] = stamp
    return call(url, lambda store, path: bytes(store.get(path, options=options).bytes()), patience)


def read_parts(url: Url, first: int, stop: int, patience: Patience = QUICK, stamp: str = "") -> Iterator[bytes]:
    """The bytes of `read`, in parts and in order. Some parts are read ahead, at the same time."""
    starts, coming = deque(range(first, stop, PART)), deque()
    while starts or coming:
        while starts and len(coming) < _CONCURRENT:
            start = starts.popleft()
            part = partial(read, url, start, min(start + PART, stop), patience, stamp)
            coming.append(call_in_thread(part, "storage"))
        yield coming.popleft().result()


def write(url: Url, data: bytes, patience: Patience = QUICK) -> None:
    """Write a small file. Raises StorageError."""
    call(url, lambda store, path: store.put(path, data), patience)


def upload_file(
    path: Path, url: Url, patience: Patience = QUICK, announce: Callable[[str], object] = lambda _: None
) -> None:
    """Write a local file to `url`. Raises StorageError and OSError. announce: called before each part is read."""
    size = path.stat().st_size
    part = max(PART, -(-size // MAX_PARTS))

    def parts() -> Iterator[bytes]:
        with path.open("rb") as file:
            while data := file.read(part):
                announce(f"uploading {path.name}")
                yield data

    def put(store: Any, key: str) -> None:
        data = parts() if size > part else b"".join(parts())
        store.put(key, data, use_multipart=size > part, chunk_size=part, max_concurrency=_CONCURRENT)

    try:
        call(url, put, patience)
    except MissingError:  # the answer to the last request was lost, and its repetition found no upload
        call(url, put, patience)


def delete(url: Url, patience: Patience = QUICK) -> None:
    """Remove a file, if it is there. Raises StorageError."""
    with suppress(MissingError):
        call(url, lambda store, path: store.delete(path), patience)


def delete_folder(url: Url, first: str, patience: Patience = QUICK) -> None:
    """Remove the files directly in a folder. first: the name of one that is removed before the others."""
    delete(url / first, patience)
    if others := list_folder(url, patience):
        call(url, lambda store, path: store.delete([f"{path}/{name}" for name in others]), patience)


def call_in_thread(function: Callable[[], Result], name: str) -> "Future[Result]":
    """Call `function` in a daemon thread, so that the caller can stop waiting, and receives signals."""
    result: Future[Result] = Future()
    threading.Thread(target=_settle, args=(result, function), daemon=True, name=name).start()
    return result


def _settle(result: "Future[Result]", function: Callable[[], Result]) -> None:
    try:
        result.set_result(function())
    except BaseException as error:
        result.set_exception(error)
