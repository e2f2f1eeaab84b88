"""The address of a file or folder on an object store, and errors of one line that name it."""

import re
from dataclasses import dataclass

from ...messages import printable, quoted

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)


def is_url(text: object) -> bool:
    """Whether `text` is a URL such as s3://bucket/run. A file:// URL is a local path."""
    match = _URL.fullmatch(str(text))
    return match is not None and match[1] not in ("file", "local")


@dataclass(frozen=True, slots=True)
class Url:
    """A URL without a slash at its end. `url / "name"` is below it.

    Raises ValueError for one without a path, and for one with a password: run.toml would keep it.
    """

    text: str

    def __post_init__(self) -> None:
        match = _URL.fullmatch(self.text)
        if match is None or not match[2].strip("/"):
            raise ValueError(f"{quoted(self.text)} names no bucket or folder: write, for example, s3://bucket/run")
        if ":" in match[2].partition("/")[0] and "@" in match[2]:
            raise ValueError(
                f"{quoted(self.text)} holds a password: remove it, and set it in the environment (docs/checkpoints.md)"
            )
        object.__setattr__(self, "text", f"{match[1]}://{match[2].strip('/')}")

    @property
    def scheme(self) -> str:
        return self.text.partition("://")[0]

    @property
    def bucket(self) -> str:
        return self.text.partition("://")[2].partition("/")[0]

    @property
    def key(self) -> str:
        """The path below the bucket."""
        return self.text.partition("://")[2].partition("/")[2]

    @property
    def name(self) -> str:
        return self.text.rpartition("/")[2]

    @property
    def parent(self) -> "Url":
        return Url(self.text.rpartition("/")[0])

    def __truediv__(self, name: object) -> "Url":
        return Url(f"{self.text}/{name}")

    def __str__(self) -> str:
        return self.text


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
