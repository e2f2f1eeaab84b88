"""What the workers of `prepare_data` do with a file or a part: measure it, hash its documents, or encode it.

A task carries everything that differs between tasks; `Setup` has what they share, such as the tokenizer. A worker keeps
the tokenizer and its open file from task to task.
"""

import hashlib
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Protocol

import numpy as np

from .held_out import ContentHash, Split
from .rows import TextField
from .split_writer import Encoder, SplitWriter
from .text_files import TextChunk, blocks
from .tokenizer import Tokenizer, tokenizer_from_json
from .work_units import Blocks, SourceFile, WorkUnit, WorkUnitReader

ENCODE_BATCH = 64  # text chunks encoded at a time
DIGEST_BYTES = 16  # of the hash by which equal documents are found


@dataclass(frozen=True, slots=True)
class Setup:
    """What all tasks share.

    tokenizer: its JSON; b"" for tasks that encode nothing, which have no split either. where: its name in messages.
    same_machine: whether the tasks run where the files were found, so that these have the same device and inode.
    """

    field: TextField
    tokenizer: bytes = b""
    where: str = ""
    split: Split | None = None
    same_machine: bool = True


class Worker:
    """The state of a worker."""

    def __init__(self, setup: Setup, tokenizer: Tokenizer | None = None):
        self.setup, self.reader, self._tokenizer = setup, WorkUnitReader(setup.field, setup.same_machine), tokenizer

    @cached_property
    def encoder(self) -> Encoder:
        tokenizer = self._tokenizer or tokenizer_from_json(self.setup.tokenizer, self.setup.where)
        assert self.setup.split is not None
        return Encoder(tokenizer, self.setup.split)


class Task(Protocol):
    def run(self, worker: Worker) -> Any: ...


@dataclass(frozen=True, slots=True)
class Measure:
    """Find the size of a file of rows and of its parts: `RowReader.measure`."""

    file: SourceFile
    part_bytes: int

    def run(self, worker: Worker) -> tuple[int, int]:
        return worker.reader.open(self.file).measure(self.part_bytes)


@dataclass(frozen=True, slots=True)
class Hashes:
    """The hashes of the documents that end in a part, and its number of rows."""

    digests: bytes  # DIGEST_BYTES of each document
    rows: int


@dataclass(frozen=True, slots=True)
class HashDocuments:
    """Hash each document of a part, to find equal ones."""

    part: WorkUnit

    def run(self, worker: Worker) -> Hashes:
        found, current = [], _digest()
        for chunk in worker.reader.chunks(self.part):
            if isinstance(self.part, Blocks):
                if chunk.ends_document:
                    found.append(_hash_file(worker.reader, self.part.file, _digest()).digest())
                continue
            current.update(chunk.text.encode())
            if chunk.ends_document:
                found.append(current.digest())
                current = _digest()
        return Hashes(b"".join(found), worker.reader.rows)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The token ids of a part, and its counts: see `SplitWriter`.

    ended: the hash of the document of `Blocks`, if it ends in this part. The tokens of `Blocks` are all in `train`.
    """

    train: bytes
    held_out: bytes
    documents: tuple[int, int]
    text_bytes: tuple[int, int]
    rows: int
    ended: int | None = None


@dataclass(frozen=True, slots=True)
class Encode:
    """Encode the documents of a part. dropped: one bit per document, set for those to leave out; b"" for none."""

    part: WorkUnit
    dropped: bytes = b""

    def run(self, worker: Worker) -> Encoded:
        train, held_out = io.BytesIO(), io.BytesIO()
        writer, ended = SplitWriter(worker.encoder, train, held_out), None
        content_hash = ContentHash()
        for batch in _batches(without(worker.reader.chunks(self.part), unpack(self.dropped))):
            encoded = worker.encoder.tokenizer.encode_batch([chunk.text for chunk in batch])
            for chunk, tokens_N in zip(batch, encoded, strict=True):
                text = chunk.text.encode()
                content_hash.update(text)
                writer.add_tokens(tokens_N, len(text))
                if not chunk.ends_document:
                    continue
                if isinstance(self.part, Blocks):
                    ended = _hash_file(worker.reader, self.part.file, ContentHash()).value()
                    continue
                writer.end_document(content_hash.value())
                content_hash = ContentHash()
        if isinstance(self.part, Blocks):
            text_bytes = (writer.open_bytes, 0)
        else:
            text_bytes = (writer.text_bytes[0], writer.text_bytes[1])
        documents = (writer.documents[0], writer.documents[1])
        return Encoded(train.getvalue(), held_out.getvalue(), documents, text_bytes, worker.reader.rows, ended)


def without(chunks: Iterable[TextChunk], dropped: Iterable[bool]) -> Iterator[TextChunk]:
    """The chunks without those of the documents that are dropped. dropped: False for the documents after its end."""
    flags = iter(dropped)
    drop = next(flags, False)
    for chunk in chunks:
        if not drop:
            yield chunk
        if chunk.ends_document:
            drop = next(flags, False)


def pack(dropped: np.ndarray) -> bytes:
    """One bit per document; b"" if none is set."""
    return np.packbits(dropped).tobytes() if dropped.any() else b""


def unpack(bits: bytes) -> list[bool]:
    return np.unpackbits(np.frombuffer(bits, np.uint8)).astype(bool).tolist()


def _batches(chunks: Iterator[TextChunk]) -> Iterator[list[TextChunk]]:
    while batch := list(islice(chunks, ENCODE_BATCH)):
        yield batch


def _digest() -> Any:
    return hashlib.blake2b(digest_size=DIGEST_BYTES)


def _hash_file(reader: WorkUnitReader, source: SourceFile, found: Any) -> Any:
    """Update the hash `found` with the content of a file."""
    with reader.open_file(source) as file:
        for block in blocks(file):
            found.update(block)
    return found
