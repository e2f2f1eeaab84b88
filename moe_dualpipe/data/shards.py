"""Encode documents into shards: folders with token ids and a table of documents, which `prepare_data` joins.

Each file of rows becomes one shard; small text files share one. The name of a shard is a hash of everything that it
depends on: its files with sizes and times, the tokenizer and the field. A shard is written under another name and
renamed when it is complete, so a shard that exists is finished and up to date. Any number of processes on any machines
may write shards into the same folder: each skips those that exist.

A table has a row for each document: its hash, tokens and bytes. So it is decided when shards are joined which documents
are held out.
"""

import dataclasses
import hashlib
import json
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ..messages import printable
from .documents import Documents, read_document
from .encode import encode_documents
from .files import FileStatus
from .held_out import Split
from .rows import row_format
from .synced_files import sync, write_synced
from .token_files import CHUNK, HELD_OUT_FILES, TRAIN_FILE, Sidecar
from .tokenizer import Tokenizer, digest, dtype_for, num_bytes

FILES = (TRAIN_FILE, HELD_OUT_FILES[0])
SHARD_BYTES = 1 << 22
"""Text files are put together up to this size."""
_TOKENS, TABLE = "tokens.bin", "documents.npz"


@dataclass(frozen=True, slots=True)
class Shard:
    """The files of a shard, in order."""

    files: tuple[tuple[Path, FileStatus], ...]

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(status.size for _, status in self.files)

    def key(self, *options: str) -> str:
        """A hash of the files and of `options`. Other machines see other devices and inodes."""
        files = [(str(path), status.size, status.modified) for path, status in self.files]
        return hashlib.blake2b(repr((files, options)).encode(), digest_size=16).hexdigest()

    def documents(self, field: str) -> Iterator[str]:
        """The texts of the documents."""
        return (text for path, status in self.files for text in read_document(path, status, field))


def divide(found: Iterable[Documents]) -> list[Shard]:
    """Divide the files of all sources into shards, in order."""
    groups, left = list[list[tuple[Path, FileStatus]]](), 0
    for path, status in (file for documents in found for file in documents.files.items()):
        if (rows := bool(row_format(path))) or status.size > left:
            groups.append([])
            left = 0 if rows else SHARD_BYTES
        groups[-1].append((path, status))
        left -= status.size
    return [Shard(tuple(group)) for group in groups]


@dataclass(frozen=True)
class ShardWriter:
    """Writes shards into `folder`."""

    folder: Path
    tokenizer: Tokenizer
    field: str

    def path(self, shard: Shard) -> Path:
        """The folder of a shard. It exists if the shard is finished."""
        return self.folder / shard.key(digest(self.tokenizer), self.field)

    def write(self, shard: Shard) -> None:
        """Encode a shard, unless it is finished. Raises ValueError if its files are not text or have changed."""
        if (path := self.path(shard)).exists():
            return
        unfinished = Path(tempfile.mkdtemp(dir=self.folder, prefix="unfinished-"))
        try:
            table, crc32 = [], 0
            with (unfinished / _TOKENS).open("wb") as file:
                for document in encode_documents(shard.documents(self.field), self.tokenizer):
                    file.write(document.tokens_N.data)
                    crc32 = zlib.crc32(document.tokens_N.data, crc32)
                    table.append((document.hash, len(document.tokens_N), document.text_bytes))
            np.savez(unfinished / TABLE, table=np.array(table, np.uint64).reshape(-1, 3), crc32=crc32)
            for name in (_TOKENS, TABLE):
                sync(unfinished / name)
            try:
                unfinished.rename(path)
            except OSError:
                if not path.exists():  # else another process has written the same
                    raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def join(paths: list[Path], folder: Path, tokenizer: Tokenizer) -> tuple[Sidecar, Sidecar]:
    """Join shards, in order, into FILES in `folder`, and return their sidecars.

    Raises ValueError if a shard is damaged, or if there is too little text.
    """
    tables = partial(map, _read_table, paths)
    sizes = ((content_hash, tokens) for rows, _ in tables() for content_hash, tokens, _ in rows)
    split, dtype = Split.of([sizes], shortest=1), dtype_for(tokenizer.vocab_size)
    documents, text_bytes = [0, 0], [0, 0]
    with (folder / FILES[0]).open("wb") as train, (folder / FILES[1]).open("wb") as held_out:
        for path, (rows, crc32) in zip(paths, tables(), strict=True):
            contents = _contents(path, crc32, [tokens * dtype.itemsize for _, tokens, _ in rows])
            for content, (content_hash, tokens, size) in zip(contents, rows, strict=True):
                tail = split.tail(content_hash, tokens)
                cut = (tokens - tail) * dtype.itemsize
                train.write(content[:cut])
                held_out.write(content[cut:])
                documents[tail > 0] += 1
                tail_bytes = size if tail == tokens else num_bytes(tokenizer, np.frombuffer(content[cut:], dtype))
                text_bytes[0] += size - tail_bytes
                text_bytes[1] += tail_bytes
    train, held_out = (
        _describe(folder / name, count, size, tokenizer)
        for name, count, size in zip(FILES, documents, text_bytes, strict=True)
    )
    return train, held_out


def _read_table(path: Path) -> tuple[list[list[int]], int]:
    """Hash, tokens and bytes of each document of a shard, and the checksum of its tokens."""
    try:
        with np.load(path / TABLE) as saved:
            return saved["table"].tolist(), int(saved["crc32"])
    except Exception:  # numpy and zipfile raise many types
        raise _damaged(path) from None


def _contents(path: Path, crc32: int, sizes: list[int]) -> Iterator[bytes]:
    """The token ids of each document of a shard, as bytes."""
    found = 0
    with (path / _TOKENS).open("rb") as file:
        for size in sizes:
            content = file.read(size)
            found = zlib.crc32(content, found)
            yield content
    if found != crc32:
        raise _damaged(path)


def _damaged(path: Path) -> ValueError:
    return ValueError(f"{printable(path)} is damaged: remove it, and repeat the command")


def _describe(path: Path, documents: int, text_bytes: int, tokenizer: Tokenizer) -> Sidecar:
    """Describe the file of token ids `path`, and wait until both are on the disk."""
    dtype = dtype_for(tokenizer.vocab_size)
    if not (size := path.stat().st_size):
        raise ValueError("too little text to hold out some for validation: add more")
    with path.open("rb") as file:
        sums = [zlib.crc32(chunk) for chunk in iter(partial(file.read, CHUNK * dtype.itemsize), b"")]
    sidecar = Sidecar(
        dtype.name, tokenizer.vocab_size, tokenizer.end_id, size // dtype.itemsize, documents, text_bytes,
        digest(tokenizer), sums,
    )  # fmt: skip
    write_synced(path.with_name(f"{path.name}.json"), json.dumps(dataclasses.asdict(sidecar)).encode() + b"\n")
    sync(path)
    return sidecar
