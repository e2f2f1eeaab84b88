"""Send local files to a store, without sending again what is there already.

On S3, a large file is sent in parts. The parts of an upload that was cut or killed stay in the store. The next upload
of the same file asks for them, compares their MD5 sums with the file, and sends only the others. A whole file with the
same MD5 sums is not sent at all. Elsewhere, only whole files are compared, if the store reports an MD5 sum.
"""

import base64
import hashlib
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .errors import MissingError, StorageError
from .store import QUICK, Patience, call
from .urls import Url

PART = 16 * 2**20
"""Bytes of a part. A larger file than MAX_PARTS of these has larger parts."""
MAX_PARTS = 10_000
_THREADS = 4


def upload_file(
    path: Path, url: Url, patience: Patience = QUICK, announce: Callable[[str], object] = lambda _: None,
    part_bytes: int = PART,
) -> int:  # fmt: skip
    """Write a local file to `url`; returns the number of bytes that were sent. Raises StorageError and OSError.

    announce: called with what is done before each part.
    """
    announce(f"uploading {path.name}")
    if url.scheme in ("s3", "s3a"):
        return _S3Upload(path, url, patience, announce, part_bytes).run()
    size = path.stat().st_size
    if _md5_of(url, patience) == (size, _md5(path.read_bytes).hexdigest() if size <= part_bytes else _file_md5(path)):
        return 0
    call(url, lambda filesystem, remote: filesystem.put_file(str(path), remote), patience, size)
    stored = call(url, lambda filesystem, remote: filesystem.info(remote), patience)["size"]
    if stored != size:
        raise StorageError(f"{url}: {stored:,} of {size:,} bytes arrived")
    return size


def _md5_of(url: Url, patience: Patience) -> tuple[int, str]:
    """Size and MD5 sum of a file, as far as the store reports it."""
    try:
        found: Mapping[str, Any] = call(url, lambda filesystem, remote: filesystem.info(remote), patience)
    except MissingError:
        return -1, ""
    if text := found.get("md5Hash"):  # Google
        return int(found.get("size") or 0), base64.b64decode(text).hex()
    sum_ = (found.get("content_settings") or {}).get("content_md5")  # Azure
    return int(found.get("size") or 0), bytes(sum_).hex() if sum_ else ""


def _md5(read: Callable[[], bytes]) -> "hashlib._Hash":
    return hashlib.md5(read(), usedforsecurity=False)


def _file_md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, partial(hashlib.md5, usedforsecurity=False)).hexdigest()


@dataclass(frozen=True, slots=True)
class _S3Upload:
    path: Path
    url: Url
    patience: Patience
    announce: Callable[[str], object]
    part_bytes: int

    def run(self) -> int:
        size = self.path.stat().st_size
        length = max(self.part_bytes, 2**20 * math.ceil(size / MAX_PARTS / 2**20))
        ranges = [(first, min(first + length, size)) for first in range(0, size, length)] or [(0, 0)]
        if self._is_there(size, ranges):
            return 0
        if len(ranges) == 1:
            data = self._read(*ranges[0])
            self._call("put_object", len(data), Body=data)
            return len(data)
        upload, parts = self._pending()
        if upload is None:
            upload = self._call("create_multipart_upload")["UploadId"]
        sent, tags = 0, {}
        with ThreadPoolExecutor(_THREADS) as pool:
            numbered = [pool.submit(self._send, upload, n, *part, parts.get(n)) for n, part in enumerate(ranges, 1)]
            for number, future in enumerate(numbered, 1):
                try:
                    count, tags[number] = future.result()
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
                sent += count
                self.announce(f"uploading {self.path.name}")
        listed = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(tags.items())]
        self._complete(upload, listed, size, ranges)
        return sent

    def _complete(self, upload: str, listed: list[dict[str, Any]], size: int, ranges: list[tuple[int, int]]) -> None:
        try:
            self._call("complete_multipart_upload", UploadId=upload, MultipartUpload={"Parts": listed})
        except MissingError:  # an earlier attempt has completed it, but its answer was lost
            if not self._is_there(size, ranges):
                raise

    def _send(
        self, upload: str, number: int, first: int, stop: int, there: Mapping[str, Any] | None
    ) -> tuple[int, str]:
        """Send a part unless it is there; returns the number of bytes that were sent, and its tag."""
        data = self._read(first, stop)
        if there and there["Size"] == len(data) and there["ETag"].strip('"') == _md5(lambda: data).hexdigest():
            return 0, there["ETag"]
        return len(data), self._call("upload_part", len(data), UploadId=upload, PartNumber=number, Body=data)["ETag"]

    def _pending(self) -> tuple[str | None, dict[int, Mapping[str, Any]]]:
        """The newest unfinished upload of this file, and its parts by number."""
        _, key = self._place()
        found = self._call("list_multipart_uploads", keyed=False, Prefix=key).get("Uploads") or []
        uploads = sorted((u for u in found if u["Key"] == key), key=lambda u: u["Initiated"])
        if not uploads:
            return None, {}
        upload, parts, marker = uploads[-1]["UploadId"], {}, 0
        while True:
            page = self._call("list_parts", UploadId=upload, PartNumberMarker=marker)
            parts |= {part["PartNumber"]: part for part in page.get("Parts") or []}
            if not page.get("IsTruncated"):
                return upload, parts
            marker = page["NextPartNumberMarker"]

    def _is_there(self, size: int, ranges: list[tuple[int, int]]) -> bool:
        try:
            found = self._call("head_object")
        except MissingError:
            return False
        if found["ContentLength"] != size:
            return False
        sums = [_md5(partial(self._read, *part)) for part in ranges]
        if len(sums) == 1:
            expected = sums[0].hexdigest()
        else:
            expected = f"{_md5(lambda: b''.join(one.digest() for one in sums)).hexdigest()}-{len(sums)}"
        return found["ETag"].strip('"') == expected

    def _read(self, first: int, stop: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(first)
            return file.read(stop - first)

    def _place(self) -> tuple[str, str]:
        bucket, _, key = self.url.text.partition("://")[2].partition("/")
        return bucket, key

    def _call(self, method: str, nbytes: int = 0, keyed: bool = True, **arguments: Any) -> Any:
        bucket, key = self._place()
        arguments = {"Bucket": bucket, **({"Key": key} if keyed else {}), **arguments}
        return call(self.url, lambda fs, _: fs.call_s3(method, **arguments), self.patience, nbytes)


def abort_uploads(url: Url, patience: Patience = QUICK) -> None:
    """Remove the parts of unfinished uploads below a folder. Raises StorageError. Only S3 has such parts."""
    if url.scheme not in ("s3", "s3a"):
        return
    bucket, _, key = url.text.partition("://")[2].partition("/")
    listing = {"Bucket": bucket, "Prefix": f"{key}/"}
    found = call(url, lambda fs, _: fs.call_s3("list_multipart_uploads", **listing), patience).get("Uploads") or []
    for one in found:
        names = {"Bucket": bucket, "Key": one["Key"], "UploadId": one["UploadId"]}
        call(url, lambda fs, _, names=names: fs.call_s3("abort_multipart_upload", **names), patience)
