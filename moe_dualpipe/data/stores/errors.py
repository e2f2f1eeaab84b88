"""Errors of object stores, each on one line that says what to do."""

import re

from ...messages import printable
from .urls import Url

_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_DENIED = re.compile(r"status code: 40[13] |None from session.get_credentials|PermissionDenied|Unauthenticated")
_LIBRARIES = ("obstore", "huggingface_hub", "httpx", "botocore")


class StorageError(OSError):
    """A store could not be read or written. The message is one line, and names the URL."""


class MissingError(StorageError):
    """There is no such file, folder or bucket."""


class ChangedError(StorageError):
    """The file is not the one that it was, or is there already."""


def storage_error(url: Url, error: Exception) -> StorageError | None:
    """The error to raise for one of a library; None for one that is not about the store."""
    if isinstance(error, StorageError):
        return error
    if isinstance(error, ImportError):
        return StorageError(f"{url}: {printable(error)}: pip install 'moe-dualpipe[cloud]'")
    kind, reason = type(error).__name__, _reason(str(error))
    if any(code in str(error) for code in _NO_BUCKET):
        return MissingError(f"{url}: there is no such bucket")
    if isinstance(error, FileNotFoundError):
        return MissingError(f"{url}: there is no such file or folder")
    if kind in ("PreconditionError", "AlreadyExistsError"):
        return ChangedError(f"{url} was replaced while it was in use: do not change data in place; write another file")
    if _DENIED.search(f"{reason} {kind}"):
        return StorageError(
            f"{url}: access denied ({reason}): check the credentials of this process, and what they may read and write"
        )
    if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _LIBRARIES:
        return StorageError(f"{url}: {reason}")
    return None


def _reason(text: str) -> str:
    """What obstore says: the request, how often it was repeated, and the answer without its XML."""
    text = text.partition("\n\nDebug source")[0].rpartition("Error performing ")[2]
    text = re.sub(r", max_retries: .*?(?= +- )", "", text)
    message = re.search(r"<Message>(.*?)</Message>", text)
    text = text.partition("<")[0].strip(" :")
    return printable(f"{text}: {message[1]}" if message else text, 300)
