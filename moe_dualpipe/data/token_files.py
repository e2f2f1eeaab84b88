"""Token ids in files: open them, read parts of them, and check them.

`name.bin` is a flat array of little-endian integers, as in nanoGPT (uint16 by default). It does not say how to read it,
so `prepare_data` writes a sidecar file, `name.bin.json`: dtype, counts, tokenizer, and a checksum of every chunk. Files
up to SCAN_LIMIT are checked completely before a run. For larger files this would take too long, so their sequences are
only checked when they are drawn (batches.py). Either way, a run never trains on an id outside the vocabulary.
"""

import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from ..messages import printable
from .files import DataFile
from .strict_json import read_named
from .tokenizer import TOKENIZER_FILE, Tokenizer, UnknownTokenizer, digest, find_tokenizer, read_tokenizer

TRAIN_FILE, HELD_OUT_FILES = "train.bin", ("held_out.bin", "val.bin")
_COUNT = msgspec.Meta(ge=0, le=2**63 - 1)
CHUNK = 1 << 22  # tokens per checksum
SCAN_LIMIT = 1 << 30  # bytes


@dataclass(frozen=True, slots=True)
class Sidecar:
    """The contents of `name.bin.json`, which describes `name.bin`.

    bytes: of the text, counting each end of a document as one. tokenizer: its `digest`. crc32: one per CHUNK tokens.
    """

    dtype: Annotated[str, msgspec.Meta(pattern="^uint(8|16|32)$")]
    vocab_size: Annotated[int, _COUNT]
    end_id: Annotated[int, msgspec.Meta(ge=-1)]
    tokens: Annotated[int, _COUNT]
    documents: Annotated[int, _COUNT]
    bytes: Annotated[int, _COUNT]
    tokenizer: str
    crc32: list[int]


class TokensOnDisk:
    """A range of the token ids in a file. `tokens[first:stop]` reads a part, as an array of the file's dtype.

    Reading raises ValueError, which names the file, if it fails or if the file has become shorter.
    """

    def __init__(self, file: DataFile, dtype: np.dtype, first: int, stop: int):
        self.file, self.dtype, self.first, self._stop = file, dtype, first, stop

    def __len__(self) -> int:
        return self._stop - self.first

    def __getitem__(self, part: slice) -> np.ndarray:
        first, stop, step = part.indices(len(self))
        assert step == 1
        size = self.dtype.itemsize
        content = self.file.read((self.first + first) * size, max(stop - first, 0) * size)
        return np.frombuffer(content, self.dtype)


TokenStream = np.ndarray | TokensOnDisk


@dataclass(frozen=True, slots=True)
class TokenFile:
    """An open file of token ids, and its sidecar if it has one."""

    path: Path
    tokens_N: TokensOnDisk
    sidecar: Sidecar | None

    @classmethod
    def open(cls, path: Path, dtype: str) -> "TokenFile":
        """Open a file. dtype: of a file without a sidecar. Raises ValueError if the file's size does not fit."""
        name, described = printable(path), path.with_name(path.name + ".json")
        sidecar = read_named(described, Sidecar) if os.path.lexists(described) else None
        kind = np.dtype(sidecar.dtype if sidecar else dtype).newbyteorder("<")
        file = DataFile(path)
        count, rest = divmod(file.size, kind.itemsize)
        if rest:
            raise ValueError(
                f"{name} has {file.size} bytes, not a multiple of {kind.itemsize}, the size of {kind.name}: the file "
                "is truncated, or has another dtype (batch.data_dtype of train.py)"
            )
        if sidecar and sidecar.tokens != count:
            raise ValueError(
                f"{name} has {count} {kind.name} token ids, but {printable(described.name)} says {sidecar.tokens}"
            )
        return cls(path, TokensOnDisk(file, kind, 0, count), sidecar)

    def tokenizer(self, vocab_size: int) -> Tokenizer:
        """Read the tokenizer.json in the same folder. Raises ValueError if it differs from the one in the sidecar.

        Without a tokenizer.json, a file with a sidecar holds bytes, and one without holds `vocab_size` unknown tokens.
        """
        sidecar, where = self.sidecar, self.path.with_name(TOKENIZER_FILE)
        if sidecar is None:
            return read_tokenizer(where) if os.path.lexists(where) else UnknownTokenizer(vocab_size)
        found, name = find_tokenizer(self.path.parent), printable(self.path)
        if digest(found) != sidecar.tokenizer:
            place = ("the tokenizer in" if os.path.lexists(where) else "and there is no") + f" {printable(where)}"
            raise ValueError(f"{name} was not encoded with {found}, {place}")
        return found

    def scan_if_small(self, vocab_size: int) -> None:
        """Check the whole file, unless it has more than SCAN_LIMIT bytes. Errors: as in `scan`."""
        if self.tokens_N.file.size <= SCAN_LIMIT:
            self.scan(vocab_size)

    def scan(self, vocab_size: int) -> None:
        """Check the whole file. Raises ValueError, with the position, for a wrong checksum or an id >= `vocab_size`."""
        sums, name = self.sidecar.crc32 if self.sidecar else None, printable(self.path)
        if sums is not None and len(sums) != -(-len(self.tokens_N) // CHUNK):
            raise ValueError(f"{name}.json has {len(sums)} checksums for {len(self.tokens_N)} tokens")
        for first in range(0, len(self.tokens_N), CHUNK):
            chunk = self.tokens_N[first : first + CHUNK]
            if sums is not None and zlib.crc32(chunk.data) != sums[first // CHUNK]:
                last = first + len(chunk) - 1
                raise ValueError(f"{name} has changed in tokens {first} to {last}: prepare it again")
            if chunk.max() >= vocab_size:
                raise vocabulary_error(self.path, first, chunk, vocab_size)
        self.tokens_N.file.check_unchanged()


def vocabulary_error(path: object, first: int, tokens: np.ndarray, vocab_size: int) -> ValueError:
    """The error for `tokens`, read from index `first` of file `path`, that contain an id >= `vocab_size`."""
    at = int(np.argmax(tokens >= vocab_size))
    return ValueError(
        f"{printable(path)}: token {first + at} is {int(tokens[at])}, outside the vocabulary of {vocab_size}: use a "
        "larger model.vocab_size, or another batch.data_dtype if the file has no .json; otherwise the file is broken"
    )
