"""Training batches: random windows of token streams, as a pure function of (seed, step).

A resumed run therefore needs no data-loader state, and every pipeline rank can build the same batch without
communication. A stream is all documents of a source in order, each followed by the end-of-document id. A sequence is a
window anywhere in a stream, so it may span several documents. With several sources, each sequence first draws its
source by weight.

B sequences, S positions.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ..messages import plural, printable
from .token_files import TokensOnDisk, TokenStream, vocabulary_error
from .tokenizer import BYTES, Tokenizer, digest, find_tokenizer

if TYPE_CHECKING:
    from torch import Tensor


FINGERPRINT_PARTS, FINGERPRINT_TOKENS = 256, 64  # read of a file

MANY_SOURCES = 8  # more are described on one line
QUOTE = "quote a glob, as in 'notes/*.md', to make it one source"


@dataclass(frozen=True)
class Source:
    """One entry of --data: its training and held-out token streams, and its sampling weight.

    description: what else to say of it.
    """

    name: str
    weight: float
    train: TokenStream
    held_out: TokenStream
    description: str
    bytes_per_token: float | None = 1.0
    """Mean over the held-out text, counting the end of a document as one byte. None if the tokenizer is unknown."""


@dataclass(frozen=True)
class TextData:
    """The sources of a run and their common tokenizer; draws the batches."""

    sources: tuple[Source, ...]
    tokenizer: Tokenizer = BYTES
    has_held_out: ClassVar[bool] = True

    def batch(
        self, seed: int, step: int, count: int, seq_len: int, rows: range | None = None
    ) -> "tuple[Tensor, Tensor]":
        """Draw the `count` sequences of a step: inputs and labels, each [B, S] int64.

        rows: the ones to read; None: all. Which sequences a step has does not depend on who reads which of them.
        """
        random = np.random.Generator(np.random.Philox(key=[seed, step << 20]))
        streams = [source.train for source in self.sources]
        if len(streams) > 1:
            streams = [streams[i] for i in random.choice(len(streams), count, p=self.shares)]
            starts = random.integers(0, [len(stream) - seq_len for stream in streams])
        else:
            streams, starts = streams * count, random.integers(0, len(streams[0]) - seq_len, count)
        own = slice(None) if rows is None else slice(rows.start, rows.stop)
        return self._read([*zip(streams, starts.tolist(), strict=True)][own], seq_len)

    def num_labels(self, step: int, count: int, seq_len: int) -> int:
        """The number of labeled tokens in the `count` sequences of a step."""
        return count * seq_len

    def num_held_out_labels(self, count: int, seq_len: int) -> int:
        """The number of labeled tokens in `count` held-out sequences."""
        return count * seq_len

    def held_out_batch(self, first: int, count: int, total: int, seq_len: int) -> "tuple[Tensor, Tensor]":
        """Return sequences `first` to `first + count` of `total`, spaced evenly over the held-out text.

        Each source gets its share of `total`, rounded, so its weight is the same in the validation and training losses.
        """
        bounds = np.rint(np.cumsum([0.0, *self.shares]) * total).astype(int)
        windows = [
            (source.held_out, start)
            for source, sequences in zip(self.sources, np.diff(bounds), strict=True)
            for start in np.linspace(0, len(source.held_out) - seq_len - 1, sequences).astype(np.int64).tolist()
        ]
        return self._read(windows[first : first + count], seq_len)

    @property
    def shares(self) -> list[float]:
        """The fraction of sequences drawn from each source; they sum to 1."""
        total = math.fsum(source.weight for source in self.sources)
        return [source.weight / total for source in self.sources]

    @property
    def description(self) -> str:
        """One line for each source, or one for all if they are many, and one for the tokenizer unless it is bytes."""
        sources, lines = self.sources, list[str]()
        if (count := len(sources)) > MANY_SOURCES:
            names = f"{printable(sources[0].name)} to {printable(sources[-1].name)}"
            lines.append(f"data {names}: {count:,} sources, {_size(sources)}; {QUOTE}")
        for source, share in [] if lines else zip(sources, self.shares, strict=True):
            of_sequences = f" ({share:.1%} of the sequences)" if count > 1 else ""
            lines.append(f"data {printable(source.name)}{of_sequences}: {_size([source])}{source.description}")
        if self.tokenizer is not BYTES:
            size = self.bytes_per_token
            lines.append(f"tokenizer: {self.tokenizer}{f', {size:.2f} bytes per token' if size else ''}")
        return "\n".join(lines)

    @property
    def bytes_per_token(self) -> float | None:
        """Mean over the held-out text of all sources, by their shares. None if it is unknown for any of them."""
        sizes = [source.bytes_per_token for source in self.sources]
        return sum(s * share for s, share in zip(sizes, self.shares, strict=True) if s) if all(sizes) else None

    def format_losses(self, *losses: float) -> str:
        """Format losses, given in nats per token: "5.5733 -> 1.8350 nats per byte"."""
        per_token = " -> ".join(f"{loss:.4f}" for loss in losses)
        if self.tokenizer is BYTES:
            return f"{per_token} nats per byte"
        if (size := self.bytes_per_token) is None:
            return f"{per_token} nats per token"
        return f"{per_token} nats per token, {' -> '.join(f'{loss / size:.4f}' for loss in losses)} nats per byte"

    def fingerprint(self) -> int:
        """A 63-bit hash of weights, tokenizer and token ids; of a file, of its length and of some of its token ids.

        The names of sources do not matter: machines may store the same text in different places.
        """
        content = hashlib.blake2b(digest(self.tokenizer).encode(), digest_size=8)
        for source in self.sources:
            content.update(repr(source.weight).encode())
            for stream in (source.train, source.held_out):
                content.update(f"{len(stream)} {stream.dtype.str}".encode())
                if isinstance(stream, np.ndarray):
                    content.update(np.ascontiguousarray(stream).data)
                else:
                    starts = np.linspace(0, len(stream), FINGERPRINT_PARTS, dtype=np.int64).tolist()
                    for first in starts:
                        content.update(stream[first : first + FINGERPRINT_TOKENS].tobytes())
        return int.from_bytes(content.digest()) >> 1

    def check_tokenizer(self, checkpoint: Path) -> None:
        """Raise ValueError if `checkpoint`, or an exported folder, was trained with another tokenizer."""
        saved = find_tokenizer(checkpoint)
        if digest(saved) != digest(self.tokenizer):
            raise ValueError(
                f"{printable(checkpoint)} was trained with another tokenizer: {saved}; --data has {self.tokenizer}"
            )

    def _read(self, windows: list[tuple[TokenStream, int]], seq_len: int) -> "tuple[Tensor, Tensor]":
        import torch  # not at the top: `moe-dualpipe data` starts faster without it

        rows = np.stack([stream[start : start + seq_len + 1] for stream, start in windows]).astype(np.int64)
        for file in {stream.file for stream, _ in windows if isinstance(stream, TokensOnDisk)}:
            file.check_unchanged()  # checked after reading, so these tokens are those from the start of the run
        if (invalid := (rows >= self.tokenizer.vocab_size).any(1)).any():  # the file was too large to scan
            row = int(np.argmax(invalid))
            stream, start = windows[row]
            name, first = (stream.file.path, stream.first) if isinstance(stream, TokensOnDisk) else ("the text", 0)
            raise vocabulary_error(name, first + start, rows[row], self.tokenizer.vocab_size)
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _size(sources: Sequence[Source]) -> str:
    tokens, held_out = (sum(len(getattr(source, side)) for source in sources) for side in ("train", "held_out"))
    return f"{plural(tokens, 'token')}, {held_out:,} held out"
