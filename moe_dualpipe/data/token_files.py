"""Token ids in memory-mapped files: write them, describe them, and check them.

`name.bin` is a flat array of little-endian integers, as in nanoGPT (uint16 by default). It does not say how to read it,
so `prepare_data` writes a sidecar file, `name.bin.json`: dtype, counts, tokenizer, and a checksum of every chunk. Files
up to SCAN_LIMIT are checked completely before a run. For larger files this would take too long, so their sequences are
only checked when they are drawn (batches.py). Neither way can train on an id outside the vocabulary.
"""

import dataclasses
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from .documents import Documents, TextChunk, held_out_tail, is_held_out
from .tokenizer import (
    BYTES,
    TOKENIZER_FILE,
    BPETokenizer,
    Tokenizer,
    UnknownTokenizer,
    digest,
    dtype_for,
    find_tokenizer,
    num_bytes,
    read_tokenizer,
)

TRAIN_FILE, HELD_OUT_FILES = "train.bin", ("held_out.bin", "val.bin")
DTYPES = ("uint8", "uint16", "uint32")
CHUNK = 1 << 22  # tokens per checksum
SCAN_LIMIT = 1 << 30  # bytes
ENCODE_BATCH = 64  # text chunks encoded at a time


@dataclass(frozen=True, slots=True)
class Sidecar:
    """The contents of `name.bin.json`, which describes `name.bin`.

    bytes: of the text, counting each end of a document as one. tokenizer: its `digest`. crc32: one per CHUNK tokens.
    """

    dtype: str
    vocab_size: int
    end_id: int
    tokens: int
    documents: int
    bytes: int
    tokenizer: str
    crc32: list[int]

    @classmethod
    def read(cls, path: Path) -> "Sidecar":
        """Read and check a sidecar. Raises ValueError, naming file and field, if it is not valid."""
        try:
            fields = json.loads(path.read_bytes())
        except (ValueError, OSError, RecursionError) as error:
            raise ValueError(f"cannot read {path}: {error or 'nested too deep'}") from None
        if not isinstance(fields, dict):
            raise ValueError(f"{path} does not describe token ids: it is not a JSON object")
        for field in dataclasses.fields(cls):
            value = fields.get(field.name)
            kind = list if field.name == "crc32" else str if field.name in ("dtype", "tokenizer") else int
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(f"{path} does not describe token ids: {field.name} is {value!r}")
        if fields["dtype"] not in DTYPES:
            raise ValueError(f"{path} does not describe token ids: dtype is {fields['dtype']!r}, not {DTYPES}")
        return cls(**{field.name: fields[field.name] for field in dataclasses.fields(cls)})


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A memory-mapped file of token ids, and its sidecar if it has one."""

    path: Path
    tokens_N: np.ndarray
    sidecar: Sidecar | None

    @classmethod
    def open(cls, path: Path, dtype: str) -> "TokenFile":
        """Map a file. dtype: of a file without a sidecar. Raises ValueError if the file's size does not fit."""
        described = path.with_name(path.name + ".json")
        sidecar = Sidecar.read(described) if described.exists() else None
        kind = np.dtype(sidecar.dtype if sidecar else dtype).newbyteorder("<")
        count, rest = divmod(size := path.stat().st_size, kind.itemsize)
        if not size:
            raise ValueError(f"{path} is empty")
        if rest:
            raise ValueError(
                f"{path} has {size} bytes, not a multiple of {kind.itemsize}, the size of {kind.name}: the file is "
                "truncated, or has another dtype (train.py --data-dtype)"
            )
        if sidecar and sidecar.tokens != count:
            raise ValueError(f"{path} has {count} {kind.name} token ids, but {described.name} says {sidecar.tokens}")
        return cls(path, np.memmap(path, kind, mode="r"), sidecar)

    def tokenizer(self, vocab_size: int) -> Tokenizer:
        """Read the tokenizer.json in the same folder. Raises ValueError if it differs from the one in the sidecar.

        Without a tokenizer.json, a file with a sidecar holds bytes, and one without holds `vocab_size` unknown tokens.
        """
        sidecar, where = self.sidecar, self.path.with_name(TOKENIZER_FILE)
        if sidecar is None:
            return read_tokenizer(where) if where.exists() else UnknownTokenizer(vocab_size)
        found = find_tokenizer(self.path.parent)
        if digest(found) != sidecar.tokenizer:
            place = f"the tokenizer in {where}" if where.exists() else f"and there is no {where}"
            raise ValueError(f"{self.path} was not encoded with {found}, {place}")
        if (found.vocab_size, found.end_id) != (sidecar.vocab_size, sidecar.end_id):
            raise ValueError(
                f"{self.path}.json describes a tokenizer with {sidecar.vocab_size} tokens and end-of-document id "
                f"{sidecar.end_id}, but {found} has {found.vocab_size} and {found.end_id}"
            )
        return found

    def scan(self, vocab_size: int) -> None:
        """Check the whole file. Raises ValueError, with the position, for a wrong checksum or an id >= `vocab_size`."""
        sums = self.sidecar.crc32 if self.sidecar else None
        if sums is not None and len(sums) != -(-len(self.tokens_N) // CHUNK):
            raise ValueError(f"{self.path}.json has {len(sums)} checksums for {len(self.tokens_N)} tokens")
        for i, chunk in enumerate(_chunks(self.tokens_N)):
            first = i * CHUNK
            if sums is not None and zlib.crc32(chunk.data) != sums[i]:
                last = first + len(chunk) - 1
                raise ValueError(f"{self.path} has changed in tokens {first} to {last}: prepare it again")
            if chunk.max() >= vocab_size:
                raise vocabulary_error(self.path, first, chunk, vocab_size)


def vocabulary_error(path: object, first: int, tokens: np.ndarray, vocab_size: int) -> ValueError:
    """The error for `tokens`, read from index `first` of file `path`, that contain an id >= `vocab_size`."""
    at = int(np.argmax(tokens >= vocab_size))
    return ValueError(
        f"{path}: token {first + at} is {int(tokens[at])}, outside the vocabulary of {vocab_size}: use a larger "
        "--model.vocab-size, or another --data-dtype if the file has no .json; otherwise the file is broken"
    )


def prepare_data(
    sources: list[str], out: Path, tokenizer: str, vocab_size: int, field: str
) -> tuple[Tokenizer, list[Sidecar]]:
    """Encode the documents of `sources` into a new folder `out`, which appears only when it is complete.

    tokenizer: "bpe" (trained on the text, at most `vocab_size` tokens), "bytes", or the path of a tokenizer.json.
    Returns the tokenizer and the sidecars of train.bin and held_out.bin. Raises ValueError if a source is not text.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out} already exists and is not empty: choose another folder")
    found = [Documents.find(source, field) for source in sources]
    counts = [sum(chunk.ends_document for chunk in documents) for documents in found]
    if 0 in counts:
        raise found[counts.index(0)].empty_error()
    if tokenizer == "bpe":
        chosen: Tokenizer = BPETokenizer.train((chunk.text for documents in found for chunk in documents), vocab_size)
    else:
        chosen = BYTES if tokenizer == "bytes" else read_tokenizer(Path(tokenizer))
    unfinished = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        (unfinished / TOKENIZER_FILE).write_bytes(chosen.to_json())
        sidecars = _write((chunk for documents in found for chunk in documents), sum(counts), chosen, unfinished)
        unfinished.replace(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return chosen, sidecars


def _write(chunks: Iterator[TextChunk], num_documents: int, tokenizer: Tokenizer, folder: Path) -> list[Sidecar]:
    dtype, paths = dtype_for(tokenizer.vocab_size), [folder / TRAIN_FILE, folder / HELD_OUT_FILES[0]]
    end = np.array([tokenizer.end_id], dtype).tobytes()
    document, documents, size = 0, [0, 0], [0, 0]  # number of the next document; documents and bytes of each file
    with paths[0].open("wb") as train, paths[1].open("wb") as held_out:
        while batch := list(islice(chunks, ENCODE_BATCH)):
            for chunk, tokens_N in zip(batch, tokenizer.encode_batch([c.text for c in batch]), strict=True):
                held = is_held_out(document, num_documents)
                (held_out if held else train).write(tokens_N.tobytes() + end * chunk.ends_document)
                size[held] += len(chunk.text.encode()) + chunk.ends_document
                documents[held] += chunk.ends_document
                document += chunk.ends_document
    if not documents[1]:
        tokens_N = np.memmap(paths[0], dtype, mode="r")
        cut = len(tokens_N) - held_out_tail(len(tokens_N))
        tail_N = tokens_N[cut:]
        tail_N.tofile(paths[1])
        size[1], documents[1] = num_bytes(tokenizer, tail_N), int((tail_N == tokenizer.end_id).sum())
        size[0], documents[0] = size[0] - size[1], documents[0] - documents[1]
        os.truncate(paths[0], cut * dtype.itemsize)
    return [_write_sidecar(*each, tokenizer, dtype) for each in zip(paths, documents, size, strict=True)]


def _write_sidecar(path: Path, documents: int, size: int, tokenizer: Tokenizer, dtype: np.dtype) -> Sidecar:
    if not path.stat().st_size:
        raise ValueError("too little text to hold out some for validation: add more")
    tokens_N = np.memmap(path, dtype, mode="r")
    sums = [zlib.crc32(chunk.data) for chunk in _chunks(tokens_N)]
    vocab_size, end_id = tokenizer.vocab_size, tokenizer.end_id
    sidecar = Sidecar(dtype.name, vocab_size, end_id, len(tokens_N), documents, size, digest(tokenizer), sums)
    path.with_name(path.name + ".json").write_text(json.dumps(dataclasses.asdict(sidecar)) + "\n")
    return sidecar


def _chunks(tokens_N: np.ndarray) -> Iterator[np.ndarray]:
    return (tokens_N[i : i + CHUNK] for i in range(0, len(tokens_N), CHUNK))
