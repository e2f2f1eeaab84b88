"""Errors of object stores, each on one line that says what to do.

Every library behind fsspec has its own exceptions. They are divided into those that may pass, after which a call is
repeated, and those that will not: no such file, no permission, a missing package.
"""

import errno

from ...messages import printable
from .urls import Url

_LIBRARIES = {
    *("aiohttp", "aiobotocore", "botocore", "urllib3", "requests", "httpx", "httpcore", "http", "google", "gcsfs"),
    *("huggingface_hub", "adlfs", "azure", "ssl", "asyncio", "fsspec"),
}
_LASTING = (errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EMSGSIZE, errno.ENAMETOOLONG, errno.ENOSPC)
_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError")


class StorageError(OSError):
    """A store could not be read or written. The message is one line, and names the URL."""


class MissingError(StorageError):
    """There is no such file, folder or bucket."""


def may_pass(error: BaseException) -> bool:
    """Whether it makes sense to repeat the call that raised `error`."""
    if isinstance(error, FileNotFoundError | PermissionError | FileExistsError | IsADirectoryError | ImportError):
        return False
    if type(error).__name__ in _CREDENTIALS or _status(error) in (400, 401, 403, 404):
        return False
    if isinstance(error, OSError) and error.errno in _LASTING:
        return False
    return isinstance(error, OSError | EOFError) or type(error).__module__.partition(".")[0] in _LIBRARIES


def lasting_error(url: Url, error: BaseException) -> StorageError | None:
    """The error to raise for one that will not pass; None if it is not one of a store."""
    reason = printable(str(error) or type(error).__name__, 300)
    if isinstance(error, ImportError):
        return StorageError(f"{url}: {reason}: pip install 'moe-dualpipe[cloud]'")
    if isinstance(error, FileNotFoundError) or _status(error) == 404:
        if missing_bucket(error):
            return MissingError(f"{url}: there is no such bucket ({reason})")
        return MissingError(f"{url}: there is no such file or folder")
    if isinstance(error, PermissionError) or type(error).__name__ in _CREDENTIALS or _status(error) in (401, 403):
        return StorageError(
            f"{url}: access denied ({reason}): check the credentials of this process, and what they may read and write"
        )
    if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _LIBRARIES:
        return StorageError(f"{url}: {reason}")
    return None


def missing_bucket(error: BaseException) -> bool:
    return "bucket does not exist" in str(error) or _code(error) == "NoSuchBucket"


def _code(error: BaseException) -> object:
    response = getattr(error.__cause__, "response", None)
    return response.get("Error", {}).get("Code") if isinstance(response, dict) else None


def _status(error: BaseException) -> object:
    return getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
