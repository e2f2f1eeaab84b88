"""Encode text into a folder of token ids, once, instead of at the start of every run."""

import dataclasses
import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..messages import printable
from .documents import Documents, TextChunk
from .files import DataFile
from .held_out import ContentHash, Split
from .token_files import CHUNK, HELD_OUT_FILES, TRAIN_FILE, Sidecar, TokensOnDisk
from .tokenizer import BYTES, TOKENIZER_FILE, BPETokenizer, Tokenizer, digest, dtype_for, num_bytes, read_tokenizer

ENCODE_BATCH = 64  # text chunks encoded at a time


def prepare_data(
    sources: list[str], out: Path, tokenizer: str, vocab_size: int, field: str
) -> tuple[Tokenizer, list[Sidecar]]:
    """Encode the documents of `sources` into a new folder `out`, which appears only when it is complete.

    A file that is in several sources is encoded once.
    tokenizer: "bpe" (trained on the text, at most `vocab_size` tokens), "bytes", or the path of a tokenizer.json.
    Returns the tokenizer and the sidecars of train.bin and held_out.bin. Raises ValueError if a source is not text.
    """
    if not sources or "" in sources:
        raise ValueError('name at least one SOURCE of text: a file, a folder, a glob, or "stdlib"')
    folder = Path(os.path.realpath(out))
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--out {printable(out)} already exists and is not empty: choose another folder")
    if os.path.ismount(folder):  # cannot be replaced
        raise ValueError(f"--out {printable(out)} is a mount point: choose a folder in it")
    found: list[Documents] = []
    for source in sources:
        documents = Documents.find(source, field, option="")
        others = documents.without(documents.shared_with(found))
        if others.files or not documents.files:
            found.append(others)
    with _unfinished(folder, out) as unfinished:  # before the text is read, which may take hours
        split = Split.of([chain.from_iterable(map(_sizes, found))], shortest=1)
        chosen = _choose_tokenizer(tokenizer, found, vocab_size)
        (unfinished / TOKENIZER_FILE).write_bytes(chosen.to_json())
        sidecars = _write(chain.from_iterable(found), split, chosen, unfinished)
        unfinished.replace(folder)
    return chosen, sidecars


@contextmanager
def _unfinished(folder: Path, out: Path) -> Iterator[Path]:
    """Create an empty folder next to `folder`, and lock it. After an error it is removed.

    Raises ValueError, naming `out`, if that fails, or if another process has the lock.
    """
    path = folder.with_name(f".{folder.name}.unfinished")
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise ValueError(f"cannot write to --out {printable(out)}: {error.strerror}") from None
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"--out {printable(out)}: another process prepares this folder") from None
        try:
            for name in os.listdir(path):  # of a process that was killed
                (path / name).unlink()
            yield path
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def _choose_tokenizer(name: str, found: list[Documents], vocab_size: int) -> Tokenizer:
    if name == "bpe":
        return BPETokenizer.train((chunk.text for documents in found for chunk in documents), vocab_size)
    return BYTES if name == "bytes" else read_tokenizer(Path(name))


def _sizes(documents: Documents) -> Iterator[tuple[int, int]]:
    """The hash and the bytes of each document. Raises ValueError if there are none."""
    content_hash, size, found = ContentHash(), 0, False
    for chunk in documents:
        content_hash.update(text := chunk.text.encode())
        size += len(text)
        if chunk.ends_document:
            yield content_hash.value(), size + 1
            content_hash, size, found = ContentHash(), 0, True
    if not found:
        raise documents.empty_error()


def _write(chunks: Iterator[TextChunk], split: Split, tokenizer: Tokenizer, folder: Path) -> list[Sidecar]:
    """Write each document to the training file, and then move its end, which may be all of it, to the held-out file."""
    dtype, paths = dtype_for(tokenizer.vocab_size), [folder / TRAIN_FILE, folder / HELD_OUT_FILES[0]]
    end = np.array([tokenizer.end_id], dtype).tobytes()
    documents, size = [0, 0], [0, 0]  # of each file; size in bytes of text
    content_hash, text_bytes, num_tokens = ContentHash(), 1, 1  # of the current document, with its end
    with paths[0].open("w+b") as train, paths[1].open("wb") as held_out:
        while batch := list(islice(chunks, ENCODE_BATCH)):
            for chunk, tokens_N in zip(batch, tokenizer.encode_batch([c.text for c in batch]), strict=True):
                content_hash.update(text := chunk.text.encode())
                train.write(tokens_N.tobytes())
                text_bytes, num_tokens = text_bytes + len(text), num_tokens + len(tokens_N)
                if not chunk.ends_document:
                    continue
                train.write(end)
                tail = split.tail(content_hash.value(), num_tokens)
                moved = _move_end(train, held_out, tail, dtype) if tail else ()
                counted = (0 if tail == num_tokens else num_bytes(tokenizer, part_N) for part_N in moved)
                tail_bytes = sum(counted) or text_bytes * (tail > 0)
                documents[tail > 0] += 1
                size = [size[0] + text_bytes - tail_bytes, size[1] + tail_bytes]
                content_hash, text_bytes, num_tokens = ContentHash(), 1, 1
    return [_write_sidecar(*each, tokenizer, dtype) for each in zip(paths, documents, size, strict=True)]


def _move_end(source: BinaryIO, target: BinaryIO, num_tokens: int, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Move the last `num_tokens` tokens of `source` to `target`. Yields what was moved, in parts."""
    first = source.seek(-num_tokens * dtype.itemsize, os.SEEK_CUR)
    while content := source.read(CHUNK):
        target.write(content)
        yield np.frombuffer(content, dtype)
    source.seek(first)
    source.truncate()


def _write_sidecar(path: Path, documents: int, size: int, tokenizer: Tokenizer, dtype: np.dtype) -> Sidecar:
    if not path.stat().st_size:
        raise ValueError("too little text to hold out some for validation: add more")
    tokens_N = _tokens(path, dtype)
    sums = [zlib.crc32(chunk.data) for chunk in tokens_N.chunks()]
    vocab_size, end_id = tokenizer.vocab_size, tokenizer.end_id
    sidecar = Sidecar(dtype.name, vocab_size, end_id, len(tokens_N), documents, size, digest(tokenizer), sums)
    path.with_name(path.name + ".json").write_text(json.dumps(dataclasses.asdict(sidecar)) + "\n")
    return sidecar


def _tokens(path: Path, dtype: np.dtype) -> TokensOnDisk:
    file = DataFile(path)
    return TokensOnDisk(file, dtype, 0, file.size // dtype.itemsize)
