"""Token ids in files that are mapped, never read whole: how they are written, and how their defects are found.

`name.bin` is a flat array of little-endian numbers, as nanoGPT's are (uint16 without more being said). Such a file
says nothing of itself, so `prepare` writes `name.bin.json` beside it: the dtype, the counts, which tokenizer made it,
and a checksum of every chunk. Token ids are checked where it costs little: files up to `SCANNED` bytes whole, before
the run; of larger ones every sequence when it is drawn (data.py), so that no wrong id is ever trained on.
"""

import dataclasses
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from .documents import Documents, Piece, held_out_tail, is_held_out
from .tokenizer import BPE, BYTES, FILE, Ids, Tokenizer, digest, dtype_for, num_bytes, read, tokenizer_of

TRAIN, HELD_OUT_NAMES = "train.bin", ("held_out.bin", "val.bin")
DTYPES = ("uint8", "uint16", "uint32")
CHUNK = 1 << 22  # tokens that share a checksum
SCANNED = 1 << 30
BATCH = 64  # pieces of text that are encoded at a time


@dataclass(frozen=True, slots=True)
class Sidecar:
    """What `name.bin.json` says of `name.bin`."""

    dtype: str
    vocab_size: int
    end_id: int
    tokens: int
    documents: int
    bytes: int
    """Bytes of the text, where the end of a document counts as one."""
    tokenizer: str
    """`tokenizer.digest` of what made it."""
    crc32: list[int]
    """Of every `CHUNK` tokens."""

    @classmethod
    def read(cls, path: Path) -> "Sidecar":
        """Raises ValueError, naming file and field, for anything but what `prepare` writes."""
        try:
            fields = json.loads(path.read_bytes())
        except (ValueError, OSError, RecursionError) as error:
            raise ValueError(f"cannot read {path}: {error or 'nested too deep'}") from None
        if not isinstance(fields, dict):
            raise ValueError(f"{path} does not describe token ids: it is no object")
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
    """A mapped file of token ids, and what its sidecar says, if it has one."""

    path: Path
    tokens_N: np.ndarray
    sidecar: Sidecar | None

    @classmethod
    def open(cls, path: Path, dtype: str) -> "TokenFile":
        """dtype: of a file without a sidecar. Raises ValueError if size and description do not fit each other."""
        described = path.with_name(path.name + ".json")
        sidecar = Sidecar.read(described) if described.exists() else None
        kind = np.dtype(sidecar.dtype if sidecar else dtype).newbyteorder("<")
        size = path.stat().st_size
        if not size:
            raise ValueError(f"{path} is empty: it has no token ids")
        if size % kind.itemsize:
            raise ValueError(
                f"{path} has {size} bytes, which is no whole number of {kind.name} token ids: it is cut off after "
                f"{size // kind.itemsize} of them, or of another dtype (--data-dtype)"
            )
        if sidecar and sidecar.tokens != size // kind.itemsize:
            found = f"{size // kind.itemsize} token ids of {kind.name}"
            raise ValueError(f"{path} has {found}, but {described.name} says {sidecar.tokens}")
        return cls(path, np.memmap(path, kind, mode="r"), sidecar)

    def tokenizer(self, vocab_size: int) -> Tokenizer:
        """What made the tokens; if nothing says, their mere numbers, below `vocab_size`.

        Raises ValueError if what lies beside them did not make them.
        """
        folder, sidecar = self.path.parent, self.sidecar
        if sidecar is None:
            return read(folder / FILE) if (folder / FILE).exists() else Ids(vocab_size)
        found = tokenizer_of(folder)
        if digest(found) != sidecar.tokenizer:
            raise ValueError(
                f"{self.path} was made by another tokenizer than {found}, which is "
                f"{f'in {folder / FILE}' if (folder / FILE).exists() else f'meant where there is no {folder / FILE}'}"
            )
        if (found.vocab_size, found.end_id) != (sidecar.vocab_size, sidecar.end_id):
            raise ValueError(
                f"{self.path}.json says that {found} has {sidecar.vocab_size} tokens and ends documents with "
                f"{sidecar.end_id}: it has {found.vocab_size} and {found.end_id}"
            )
        return found

    def scan(self, vocab_size: int) -> None:
        """Read everything once. Raises ValueError, with the place, for a changed chunk or an id past the vocabulary."""
        sums = self.sidecar.crc32 if self.sidecar else None
        if sums is not None and len(sums) != -(-len(self.tokens_N) // CHUNK):
            raise ValueError(f"{self.path}.json has {len(sums)} checksums for {len(self.tokens_N)} tokens")
        for i, chunk in enumerate(_chunks(self.tokens_N)):
            first = i * CHUNK
            if sums is not None and zlib.crc32(chunk.data) != sums[i]:
                raise ValueError(
                    f"{self.path} has changed since it was written, in tokens {first} to {first + len(chunk) - 1}: "
                    "prepare it anew"
                )
            if chunk.max() >= vocab_size:
                raise past_vocabulary(self.path, first, chunk, vocab_size)


def past_vocabulary(path: object, first: int, tokens: np.ndarray, vocab_size: int) -> ValueError:
    """The error for a file whose `tokens`, from index `first` on, have an id that is not below `vocab_size`."""
    at = int(np.argmax(tokens >= vocab_size))
    return ValueError(
        f"{path}: token {first + at} is {int(tokens[at])}, past the vocabulary of {vocab_size}: use a larger "
        "--model.vocab-size, or another --data-dtype, if the file has no description; else it is broken"
    )


def prepare(
    sources: list[str], out: Path, tokenizer: str, vocab_size: int, field: str
) -> tuple[Tokenizer, list[Sidecar]]:
    """Write the documents of `sources` as tokens into the folder `out`, which appears when it is complete.

    tokenizer: "bpe" (learned from the text, with at most `vocab_size` tokens), "bytes", or a tokenizer.json.
    Returns the tokenizer and the sidecars of train.bin and held_out.bin. Raises ValueError for text that is none.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out} is there already, and not empty: use another name")
    found = [Documents.find(source, field) for source in sources]
    counts = [sum(piece.last for piece in documents) for documents in found]
    for documents, count in zip(found, counts, strict=True):
        if not count:
            raise documents.nothing()
    if tokenizer == "bpe":
        chosen: Tokenizer = BPE.train((piece.text for documents in found for piece in documents), vocab_size)
    else:
        chosen = BYTES if tokenizer == "bytes" else read(Path(tokenizer))
    unfinished = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        (unfinished / FILE).write_bytes(chosen.to_bytes())
        sidecars = _write((p for documents in found for p in documents), sum(counts), chosen, unfinished)
        unfinished.replace(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return chosen, sidecars


def _write(pieces: Iterable[Piece], num_documents: int, tokenizer: Tokenizer, folder: Path) -> list[Sidecar]:
    dtype, paths = dtype_for(tokenizer.vocab_size), [folder / TRAIN, folder / HELD_OUT_NAMES[0]]
    end = np.array([tokenizer.end_id], dtype).tobytes()
    document, documents, size = 0, [0, 0], [0, 0]  # of train.bin, of held_out.bin
    with paths[0].open("wb") as train, paths[1].open("wb") as held_out:
        for batch in _batches(pieces, BATCH):
            for piece, tokens_N in zip(batch, tokenizer.arrays([piece.text for piece in batch]), strict=True):
                held = is_held_out(document, num_documents)
                (held_out if held else train).write(tokens_N.tobytes() + end * piece.last)
                size[held] += len(piece.text.encode()) + piece.last
                documents[held] += piece.last
                document += piece.last
    if not documents[1]:
        tokens_N = np.memmap(paths[0], dtype, mode="r")
        cut = len(tokens_N) - held_out_tail(len(tokens_N))
        tail_N = tokens_N[cut:]
        tail_N.tofile(paths[1])
        size[1], documents[1] = num_bytes(tokenizer, tail_N), int((tail_N == tokenizer.end_id).sum())
        size[0], documents[0] = size[0] - size[1], documents[0] - documents[1]
        os.truncate(paths[0], cut * dtype.itemsize)
    return [_describe(*each, tokenizer, dtype) for each in zip(paths, documents, size, strict=True)]


def _describe(path: Path, documents: int, size: int, tokenizer: Tokenizer, dtype: np.dtype) -> Sidecar:
    """Write the sidecar of a file that is complete."""
    if not path.stat().st_size:
        raise ValueError("too little text to keep some of it for validation: use more")
    tokens_N = np.memmap(path, dtype, mode="r")
    sums = [zlib.crc32(chunk.data) for chunk in _chunks(tokens_N)]
    made_by = (tokenizer.vocab_size, tokenizer.end_id, len(tokens_N), documents, size, digest(tokenizer), sums)
    sidecar = Sidecar(dtype.name, *made_by)
    path.with_name(path.name + ".json").write_text(json.dumps(dataclasses.asdict(sidecar)) + "\n")
    return sidecar


def _chunks(tokens_N: np.ndarray) -> Iterator[np.ndarray]:
    return (tokens_N[i : i + CHUNK] for i in range(0, len(tokens_N), CHUNK))


def _batches(pieces: Iterable[Piece], size: int) -> Iterator[list[Piece]]:
    pieces = iter(pieces)
    while batch := list(islice(pieces, size)):
        yield batch
