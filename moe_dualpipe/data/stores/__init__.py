"""Files on object stores: URLs such as s3://bucket/run, which obstore reads and writes.

Local paths do not need this package. A URL is represented by a local folder that stands for it (`local_copies.py`), so
that all other code works with paths, and asks `url_of(path)` where the difference matters.
"""

from .local_copies import (
    drop,
    entry_of,
    exists,
    fetch,
    local_path,
    open_folder,
    output_folder,
    url_of,
)
from .store import (
    QUICK,
    Patience,
    StorageError,
    StoredFile,
    Url,
    delete,
    delete_folder,
    info,
    is_url,
    list_folder,
    read,
    upload_file,
    write,
)

__all__ = [
    "QUICK",
    "Patience",
    "StorageError",
    "StoredFile",
    "Url",
    "delete",
    "delete_folder",
    "drop",
    "entry_of",
    "exists",
    "fetch",
    "info",
    "is_url",
    "list_folder",
    "local_path",
    "open_folder",
    "output_folder",
    "read",
    "upload_file",
    "url_of",
    "write",
]  # fmt: skip
