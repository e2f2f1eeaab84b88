"""Read text files in blocks, and check that they are text.

A chunk is a block of whole lines, so a tokenizer never sees a word cut in two; a line longer than a block is split. The
chunks of a file depend only on its content.
"""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from .files import DataFile

BLOCK_BYTES = 1 << 20  # read and encode long files in blocks of this size
NEWLINE = b"\n"


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Part of a document, in whole lines; a line longer than a block is split."""

    text: str
    ends_document: bool


def read_text(file: DataFile) -> Iterator[TextChunk]:
    """Yield the chunks of a UTF-8 file; none if it is empty."""
    decoder, before = codecs.getincrementaldecoder("utf-8")(), ""
    for block in blocks(file):
        if before:
            yield TextChunk(before, ends_document=False)
        before = decoder.decode(block)
    if before:
        yield TextChunk(before + decoder.decode(b"", final=True), ends_document=True)


def blocks(file: DataFile) -> Iterator[bytes]:
    """Yield the file in blocks of whole lines; a line longer than a block is split."""
    rest = b""
    for first in range(0, file.size, BLOCK_BYTES):
        block = file.read(first, min(BLOCK_BYTES, file.size - first))
        cut = block.rfind(NEWLINE) + 1
        if cut or len(rest) >= BLOCK_BYTES:
            yield rest + block[:cut]
            rest = b""
        rest += block[cut:]
    if rest:
        yield rest
    file.check_unchanged()


def problem_of(path: Path) -> str:
    """Why a file is not text (UTF-8 without zero bytes), with the line number; "" if it is text."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line = 1
    with DataFile(path) as file:
        for block in chain(blocks(file), [b""]):
            if (zero := block.find(b"\0")) >= 0:
                return f"zero byte in line {line + block[:zero].count(NEWLINE)}"
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                return f"not UTF-8 in line {line + error.object[: error.start].count(NEWLINE)}: {error.reason}"
            line += block.count(NEWLINE)
    return ""
