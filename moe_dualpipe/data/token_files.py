"""Token ids in files: open them, read parts of them, and check them.

`name.bin` is a flat array of little-endian integers, as in nanoGPT (uint16 by default). It does not say how to read it,
so `prepare_data` writes a sidecar file, `name.bin.json`: dtype, counts, tokenizer, and a checksum of every chunk. Files
up to SCAN_LIMIT are checked completely before a run. For larger files this would take too long, so their sequences are
only checked when they are drawn (batches.py). Either way, a run never trains on an id outside the vocabulary.

Megatron-LM writes `name.idx` beside `name.bin`: the type of the ids, and where documents end.
"""

import os
import zlib
from contextlib import suppress
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
_INDEX = np.dtype([("magic", "S9"), ("version", "<u8"), ("kind", "u1"), ("sequences", "<u8"), ("documents", "<u8")])
_INDEX_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}
"""Of an id, by the number of its type. The types of negative numbers are read as others: a negative id is too large."""


@dataclass(frozen=True, slots=True)
class Sidecar:
    """The contents of `name.bin.json`, which describes `name.bin`.

    bytes: of the text, counting each end of a document as one. tokenizer: its `digest`. crc32: one per CHUNK tokens.
    flags_crc32: the same for `name.bin.flags`, which has a byte for each token of chats (samples.py); None: not chats.
    """

    dtype: Annotated[str, msgspec.Meta(pattern="^uint(8|16|32)$")]
    vocab_size: Annotated[int, _COUNT]
    end_id: Annotated[int, msgspec.Meta(ge=-1)]
    tokens: Annotated[int, _COUNT]
    documents: Annotated[int, _COUNT]
    bytes: Annotated[int, _COUNT]
    tokenizer: str
    crc32: list[int]
    flags_crc32: list[int] | None = None


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
    """An open file of token ids, and its sidecar if it has one.

    ends_D: by document, the number of ids up to its end, from the index of Megatron-LM; empty without one. flags_N: of
    the tokens of chats.
    """

    path: Path
    tokens_N: TokensOnDisk
    sidecar: Sidecar | None
    ends_D: np.ndarray
    flags_N: TokensOnDisk | None = None

    @classmethod
    def open(cls, path: Path, dtype: str) -> "TokenFile":
        """Open a file. dtype: of a file without a sidecar or index. Raises ValueError if its size does not fit."""
        name, described = printable(path), path.with_name(path.name + ".json")
        sidecar = read_named(described, Sidecar) if os.path.lexists(described) else None
        kind, ends_D = np.dtype(sidecar.dtype if sidecar else dtype).newbyteorder("<"), np.array([], np.int64)
        index = path.with_suffix(".idx")
        if sidecar is None and os.path.lexists(index):
            described, (kind, ends_D) = index, read_index(index)
        file = DataFile(path)
        count, rest = divmod(file.size, kind.itemsize)
        if rest:
            raise ValueError(
                f"{name} has {file.size} bytes, not a multiple of {kind.itemsize}, the size of {kind.name}: the file "
                "is truncated, or has another dtype (batch.data_dtype of train.py)"
            )
        expected = sidecar.tokens if sidecar else int(ends_D[-1]) if len(ends_D) else count
        if expected != count:
            raise ValueError(
                f"{name} has {count} {kind.name} token ids, but {printable(described.name)} says {expected}"
            )
        flags_N = None
        has_flags = sidecar is not None and sidecar.flags_crc32 is not None
        if not has_flags and flags_file(path).exists():
            raise ValueError(f"{printable(flags_file(path))} is not described beside it: prepare the chats again")
        if has_flags:
            flags = DataFile(flags_file(path))
            if flags.size != count:
                raise ValueError(f"{printable(flags.path)} has {flags.size} bytes for {count} tokens: prepare it again")
            flags_N = TokensOnDisk(flags, np.dtype(np.uint8), 0, count)
        return cls(path, TokensOnDisk(file, kind, 0, count), sidecar, ends_D, flags_N)

    def tokenizer(self, vocab_size: int) -> Tokenizer:
        """Read the tokenizer.json in the same folder. Raises ValueError if it differs from the one in the sidecar.

        Without a tokenizer.json, a file with a sidecar holds bytes, and one without holds `vocab_size` unknown tokens;
        the end token is one that is at the end of each document of the index, and nowhere else.
        """
        sidecar, where, name = self.sidecar, self.path.with_name(TOKENIZER_FILE), printable(self.path)
        if sidecar is None:
            ends_D = np.unique(self.ends_D[(self.ends_D > 0) & (self.ends_D <= CHUNK)])
            start_N = self.tokens_N[: int(ends_D.max(initial=0))]
            last_D = start_N[ends_D - 1]
            if not os.path.lexists(where):
                one = len(last_D) > 1 and np.array_equal(np.flatnonzero(start_N == last_D[0]) + 1, ends_D)
                return UnknownTokenizer(vocab_size, end_id=int(last_D[0]) if one else -1)
            found = read_tokenizer(where)
            if (last_D != found.end_id).any():
                hint = "write them again with --append-eod of Megatron-LM's preprocess_data.py"
                raise ValueError(
                    f"documents of {name} do not end with token {found.end_id} of {printable(where)}: {hint}"
                )
            return found
        found = find_tokenizer(self.path.parent)
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
        sums, flag_sums = (self.sidecar.crc32, self.sidecar.flags_crc32) if self.sidecar else (None, None)
        for stream, expected in ((self.tokens_N, sums), (self.flags_N, flag_sums)):
            if stream is None:
                continue
            name = printable(stream.file.path)
            if expected is not None and len(expected) != -(-len(stream) // CHUNK):
                raise ValueError(f"{printable(self.path)}.json has {len(expected)} checksums for {len(stream)} tokens")
            for first in range(0, len(stream), CHUNK):
                chunk = stream[first : first + CHUNK]
                if expected is not None and zlib.crc32(chunk.data) != expected[first // CHUNK]:
                    last = first + len(chunk) - 1
                    raise ValueError(f"{name} has changed in tokens {first} to {last}: prepare it again")
                if stream is self.tokens_N and chunk.max() >= vocab_size:
                    raise vocabulary_error(self.path, first, chunk, vocab_size)
            stream.file.check_unchanged()


def flags_file(path: Path) -> Path:
    """The file of the flags of the tokens in `path`."""
    return path.with_name(f"{path.name}.flags")


def read_index(path: Path) -> tuple[np.dtype, np.ndarray]:
    """The type of the ids in NAME.bin, and how many there are up to each document's end, from Megatron-LM's NAME.idx.

    After a header, it has the length of each sequence in ids (int32), its first byte (int64), and the first sequence of
    each document, with one more at the end (int64). Raises ValueError if it is not such a file, or has ids as floats.
    """
    with DataFile(path) as file:
        content = bytes(file.read(0, file.size))
    with suppress(ValueError, LookupError):
        ((magic, version, kind, sequences, documents),) = np.frombuffer(content, _INDEX, 1).tolist()
        lengths = np.frombuffer(content, "<i4", sequences, _INDEX.itemsize)
        first_bytes = np.frombuffer(content, "<i8", sequences, _INDEX.itemsize + 4 * sequences)
        firsts = np.frombuffer(content, "<i8", documents, _INDEX.itemsize + 12 * sequences)
        dtype, ends = np.dtype(f"<u{_INDEX_BYTES[kind]}"), np.append(0, np.cumsum(lengths, dtype=np.int64))
        in_order = (np.diff(firsts, prepend=0, append=sequences) >= 0).all()
        if (magic, version) == (b"MMIDIDX", 1) and in_order and np.array_equal(first_bytes, ends[:-1] * dtype.itemsize):
            return dtype, ends[[*firsts[1:], sequences]]  # some writers leave out the last one
    hint = f"move it away to read {path.with_suffix('.bin').name} as batch.data_dtype"
    raise ValueError(f"{printable(path)} is not an index of integers that Megatron-LM wrote (MMIDIDX): {hint}")


def vocabulary_error(path: object, first: int, tokens: np.ndarray, vocab_size: int) -> ValueError:
    """The error for `tokens`, read from index `first` of file `path`, that contain an id >= `vocab_size`."""
    at = int(np.argmax(tokens >= vocab_size))
    return ValueError(
        f"{printable(path)}: token {first + at} is {int(tokens[at])}, outside the vocabulary of {vocab_size}: use a "
        "larger model.vocab_size, or another batch.data_dtype if the file has no .json; otherwise the file is broken"
    )
