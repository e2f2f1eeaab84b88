"""Encode documents into shards: folders of token ids, which `prepare_data` joins.

Each file of rows becomes one shard; small text files share one. The name of a shard is a hash of everything that it
depends on: its files with sizes and times, the tokenizer and the split. A shard is written under another name and
renamed when it is complete, so a shard that exists is finished and up to date. Any number of processes on any machines
may write shards into the same folder: each skips those that exist.
"""

import dataclasses
import hashlib
import json
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .documents import Documents, read_document
from .encode import encode_documents
from .files import FileStatus
from .held_out import ContentHash, Split
from .rows import TextField, row_format
from .synced_files import sync
from .text_files import TextChunk
from .token_files import CHUNK, HELD_OUT_FILES, TRAIN_FILE, Sidecar
from .tokenizer import Tokenizer, digest, dtype_for

FILES = (TRAIN_FILE, HELD_OUT_FILES[0])
SHARD_BYTES = 1 << 22
"""Text files are put together up to this size."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The files of a shard, in order. dropped: one bit for each document, set for those to leave out."""

    files: tuple[tuple[Path, FileStatus], ...]
    dropped: bytes = b""

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(status.size for _, status in self.files)

    def key(self, *options: Any) -> str:
        """A hash of the files and of `options`. Other machines see other devices and inodes."""
        files = [(str(path), status.size, status.modified) for path, status in self.files]
        return hashlib.blake2b(repr((files, self.dropped, options)).encode(), digest_size=16).hexdigest()

    def chunks(self, field: TextField) -> Iterator[TextChunk]:
        """The text of the documents that are not left out."""
        flags = iter(np.unpackbits(np.frombuffer(self.dropped, np.uint8)).tolist())
        drop = next(flags, False)
        for path, status in self.files:
            for chunk in read_document(path, status, field):
                if not drop:
                    yield chunk
                if chunk.ends_document:
                    drop = next(flags, False)

    def documents(self, field: TextField) -> Iterator[tuple[int, int]]:
        """The hash of each document, and the bytes of its text and of its end."""
        content_hash, size = ContentHash(), 1
        for chunk in self.chunks(field):
            content_hash.update(text := chunk.text.encode())
            size += len(text)
            if chunk.ends_document:
                yield content_hash.value(), size
                content_hash, size = ContentHash(), 1


def divide(found: Iterable[Documents]) -> Iterator[Shard]:
    """Divide the files of all sources into shards, in order."""
    group: list[tuple[Path, FileStatus]] = []
    for file in (file for documents in found for file in documents.files.items()):
        rows = bool(row_format(file[0]))
        if group and (rows or Shard((*group, file)).size > SHARD_BYTES):
            yield Shard(tuple(group))
            group = []
        group.append(file)
        if rows:
            yield Shard(tuple(group))
            group = []
    if group:
        yield Shard(tuple(group))


@dataclass(frozen=True)
class ShardWriter:
    """Writes shards into `folder`."""

    folder: Path
    tokenizer: Tokenizer
    split: Split
    field: TextField

    def path(self, shard: Shard) -> Path:
        """The folder of a shard. It exists if the shard is finished."""
        options = (digest(self.tokenizer), self.field.name, sorted(self.split.small.items()), CHUNK)
        return self.folder / shard.key(*options)

    def write(self, shard: Shard) -> int:
        """Encode a shard, unless it is finished. Returns the number of tokens that were encoded.

        Raises ValueError if its files are not text or have changed.
        """
        path = self.path(shard)
        if path.exists():
            return 0
        unfinished = Path(tempfile.mkdtemp(dir=self.folder, prefix="unfinished-"))
        try:
            documents, text_bytes = [0, 0], [0, 0]
            with (unfinished / FILES[0]).open("wb") as train, (unfinished / FILES[1]).open("wb") as held_out:
                for document in encode_documents(shard.chunks(self.field), self.tokenizer):
                    tail = self.split.tail(document.hash, len(document.tokens_N))
                    train.write(document.tokens_N[: len(document.tokens_N) - tail].data)
                    held_out.write(document.tokens_N[len(document.tokens_N) - tail :].data)
                    documents[tail > 0] += 1
                    text_bytes[1] += (tail_bytes := document.bytes_of_tail(tail, self.tokenizer))
                    text_bytes[0] += document.text_bytes - tail_bytes
            sidecars = [
                write_sidecar(unfinished / name, documents[i], text_bytes[i], self.tokenizer)
                for i, name in enumerate(FILES)
            ]
            with suppress(OSError):  # another process has written the same
                unfinished.rename(path)
            return sum(sidecar.tokens for sidecar in sidecars)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def write_sidecar(path: Path, documents: int, text_bytes: int, tokenizer: Tokenizer) -> Sidecar:
    """Describe the file of token ids `path`, and wait until both are on the disk."""
    dtype = dtype_for(tokenizer.vocab_size)
    with path.open("rb") as file:
        sums = [zlib.crc32(chunk) for chunk in iter(partial(file.read, CHUNK * dtype.itemsize), b"")]
    vocab_size, tokens = tokenizer.vocab_size, path.stat().st_size // dtype.itemsize
    sidecar = Sidecar(dtype.name, vocab_size, tokenizer.end_id, tokens, documents, text_bytes, digest(tokenizer), sums)
    described = path.with_name(f"{path.name}.json")
    described.write_text(json.dumps(dataclasses.asdict(sidecar)) + "\n")
    sync(path)
    sync(described)
    return sidecar
