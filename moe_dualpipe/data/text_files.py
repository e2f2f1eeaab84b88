"""Read text files in blocks, and check that they are text."""

import codecs
from collections.abc import Iterator

from .files import DataFile

BLOCK_BYTES, NEWLINE = 1 << 20, b"\n"


class NotTextError(ValueError):
    """Where a file is not UTF-8 without zero bytes, and why."""


def read_text(file: DataFile) -> Iterator[str]:
    """Yield the text of a UTF-8 file, in blocks. Raises NotTextError, with the line number."""
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    for first in range(0, file.size, BLOCK_BYTES):
        block = file.read(first, min(BLOCK_BYTES, file.size - first))
        if (zero := block.find(b"\0")) >= 0:
            raise NotTextError(f"zero byte in line {line + block[:zero].count(NEWLINE)}")
        try:
            text = decoder.decode(block, final=first + len(block) == file.size)
        except UnicodeDecodeError as error:
            at = line + error.object[: error.start].count(NEWLINE)
            raise NotTextError(f"not UTF-8 in line {at}: {error.reason}") from None
        yield text
        line += block.count(NEWLINE)
    file.check_unchanged()
