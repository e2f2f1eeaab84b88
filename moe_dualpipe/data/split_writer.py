"""Write token ids to a training and a held-out file, each document to the side where it belongs."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from .held_out import Split
from .token_files import CHUNK
from .tokenizer import Tokenizer, dtype_for, num_bytes


@dataclass(frozen=True, slots=True)
class Encoder:
    """What it takes to encode documents."""

    tokenizer: Tokenizer
    split: Split

    @property
    def dtype(self) -> np.dtype:
        return dtype_for(self.tokenizer.vocab_size)


class SplitWriter:
    """Writes each document to the training file, and then moves its end, which may be all of it, to the other file.

    documents, text_bytes: of the training and the held-out file; the end of a document counts as one byte.
    open_tokens, open_bytes: of the document that has no end yet.
    """

    def __init__(self, encoder: Encoder, train: BinaryIO, held_out: BinaryIO):
        self._encoder, self.train, self.held_out = encoder, train, held_out
        self.documents, self.text_bytes = [0, 0], [0, 0]
        self.open_tokens = self.open_bytes = 0

    def add_tokens(self, tokens_N: np.ndarray, text_bytes: int) -> None:
        """Continue the open document."""
        self.train.write(tokens_N.tobytes())
        self.open_tokens += len(tokens_N)
        self.open_bytes += text_bytes

    def end_document(self, content_hash: int) -> None:
        """End the open document, and hold out what the split says."""
        tokenizer, dtype = self._encoder.tokenizer, self._encoder.dtype
        self.add_tokens(np.array([tokenizer.end_id], dtype), 1)
        tail = self._encoder.split.tail(content_hash, self.open_tokens)
        moved = _move_end(self.train, self.held_out, tail, dtype) if tail else ()
        counted = (0 if tail == self.open_tokens else num_bytes(tokenizer, part_N) for part_N in moved)
        tail_bytes = sum(counted) or self.open_bytes * (tail > 0)
        self.documents[tail > 0] += 1
        self.text_bytes[0] += self.open_bytes - tail_bytes
        self.text_bytes[1] += tail_bytes
        self.open_tokens = self.open_bytes = 0


def _move_end(source: BinaryIO, target: BinaryIO, num_tokens: int, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Move the last `num_tokens` tokens of `source` to `target`. Yields what was moved, in parts."""
    first = source.seek(-num_tokens * dtype.itemsize, os.SEEK_CUR)
    while content := source.read(CHUNK):
        target.write(content)
        yield np.frombuffer(content, dtype)
    source.seek(first)
    source.truncate()
