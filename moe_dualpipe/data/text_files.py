"""Read text files in blocks, from any block on, and check that they are text.

A chunk is a block of whole lines, so a tokenizer never sees a word cut in two; a line longer than a block is split. The
chunks of a file depend only on its content. So several processes can read different blocks of one file, and together
get the chunks that one process gets.
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


def read_text(file: DataFile, first: int = 0, stop: int | None = None) -> Iterator[TextChunk]:
    """Yield the chunks of UTF-8 text that start in the blocks `first` to `stop` (exclusive; None: the end)."""
    begin = first * BLOCK_BYTES
    end = file.size if stop is None else stop * BLOCK_BYTES
    decoder, before = codecs.getincrementaldecoder("utf-8")(), ""
    start = _chunk_start(file, begin)
    for block in blocks(file, start):
        if before:
            yield TextChunk(before, ends_document=False)
        if start >= end:
            return
        text = decoder.decode(block)
        before = text if start >= begin else ""
        start += len(block)
    if before:
        yield TextChunk(before + decoder.decode(b"", final=True), ends_document=True)


def blocks(file: DataFile, start: int = 0) -> Iterator[bytes]:
    """Yield the file in blocks of whole lines; a line longer than a block is split. start: where a block starts."""
    rest, first = b"", start
    while first < file.size:
        stop = min((first // BLOCK_BYTES + 1) * BLOCK_BYTES, file.size)
        block = file.read(first, stop - first)
        cut = block.rfind(NEWLINE) + 1
        if cut or len(rest) >= BLOCK_BYTES:
            yield rest + block[:cut]
            rest = b""
        rest += block[cut:]
        first = stop
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


def _chunk_start(file: DataFile, at: int) -> int:
    """The last place at or before `at`, the start of a block, that is known to start a chunk: the file, or a line."""
    while at > 0:
        at -= BLOCK_BYTES
        if cut := file.read(at, BLOCK_BYTES).rfind(NEWLINE) + 1:
            return at + cut
    return 0
