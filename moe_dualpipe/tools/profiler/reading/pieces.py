"""The text of a file in pieces: plain or gzip, of one or several members, with or without a byte-order mark.

Invalid UTF-8 becomes lone surrogates, which the reader of events finds again. Of gzip data that is damaged or cut off,
everything before the damage is used.
"""

import codecs
import zlib
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

CHUNK = 1 << 20
_GZIP = b"\x1f\x8b"
_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
DAMAGED_GZIP = "its gzip data is damaged"


def text_pieces(path: Path, notes: list[str]) -> Generator[str, None, None]:
    """Yield the text of `path`. Appends to `notes` what was wrong with it. Raises zlib.error if nothing can be read."""
    with path.open("rb") as file:
        compressed = file.read(2) == _GZIP
        file.seek(0)
        parts = _expanded(file, notes) if compressed else iter(lambda: file.read(CHUNK), b"")
        start = b""
        while len(start) < 3 and (more := next(parts, b"")):
            start += more
        mark, encoding = next((found for found in _MARKS if start.startswith(found[0])), (b"", "utf-8"))
        errors = "surrogateescape" if encoding == "utf-8" else "replace"
        decode = codecs.getincrementaldecoder(encoding)(errors).decode
        part = start[len(mark) :]
        while part:
            if text := decode(part):
                yield text
            part = next(parts, b"")


def _expanded(file: BinaryIO, notes: list[str]) -> Iterator[bytes]:
    """Yield the contents of all gzip members, at most CHUNK bytes at a time."""
    expand, empty = zlib.decompressobj(wbits=31), True
    while data := file.read(CHUNK):
        while data:
            if expand.eof:  # the next member, or padding
                data = data.lstrip(b"\0")
                if not data.startswith(_GZIP[: len(data)]):
                    return
                expand = zlib.decompressobj(wbits=31)
            before = expand.copy()
            try:
                part = expand.decompress(data, CHUNK)
            except zlib.error:
                for part in _before_damage(before, data):
                    empty = empty and not part
                    yield part
                if empty:
                    raise
                notes.append(DAMAGED_GZIP)
                return
            if part:
                empty = False
                yield part
            data = expand.unused_data if expand.eof else expand.unconsumed_tail


def _before_damage(expand, data: bytes) -> Iterator[bytes]:
    """Yield what `data` holds before the byte at which decompression fails: zlib drops all output of a failed call."""
    with suppress(zlib.error):
        for index in range(len(data)):
            if part := expand.decompress(data[index : index + 1]):
                yield part
