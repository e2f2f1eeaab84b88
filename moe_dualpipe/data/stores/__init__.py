"""Files on object stores: URLs such as s3://bucket/run, which fsspec reads and writes.

A local path never comes here: it keeps its code. A URL is represented by a local folder that stands for it
(`local_copies.py`), so that all other code works with paths, and asks `url_of(path)` where the difference matters.
"""

from .blocks import BLOCK, BlockCache, RemoteFile, block_cache
from .copies import drop, exists, fetch, fetch_all, open_folder, size_of, sizes_of
from .errors import StorageError
from .local_copies import local_path, output_folder, staged_folder, url_of
from .ranges import RangedFile
from .store import QUICK, Patience, delete, delete_folder, info, list_folder, read, write
from .upload import abort_uploads, upload_file
from .urls import Url, is_url

__all__ = [
    "BLOCK", "QUICK", "BlockCache", "Patience", "RangedFile", "RemoteFile", "StorageError", "Url", "abort_uploads",
    "block_cache", "delete", "delete_folder", "drop", "exists", "fetch", "fetch_all", "info", "is_url", "list_folder",
    "local_path", "open_folder", "output_folder", "read", "size_of", "sizes_of", "staged_folder", "upload_file",
    "url_of", "write",
]  # fmt: skip
