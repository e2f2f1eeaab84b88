"""Encode documents: several at once if they are short, and one in pieces if it is long."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from .tokenizer import Tokenizer

PIECE = 1 << 20
"""Characters of a piece, at most. A tokenizer needs many times the memory of its text."""
BATCH_PIECES = 32


@dataclass(frozen=True, slots=True)
class EncodedDocument:
    """The form in which every reader gives a document: its token ids, with the end token.

    hash: the first 8 bytes of BLAKE2b of its UTF-8 text, as an unsigned big-endian number. text_bytes: of the text,
    counting the end token as one byte.
    """

    hash: int
    tokens_N: np.ndarray
    text_bytes: int


def encode_documents(
    texts: Iterable[str], tokenizer: Tokenizer, special_tokens: bool = False
) -> Iterator[EncodedDocument]:
    """Encode documents, each between the tokenizer's start and end tokens. special_tokens: as for `encode_batch`.

    Memory holds the tokens of one document, and the texts of a batch.
    """
    pieces, parts = ((text, *piece) for text in texts for piece in split_lines(text)), list[np.ndarray]()
    while batch := [*islice(pieces, BATCH_PIECES)]:
        encoded = tokenizer.encode_batch([piece for _, piece, _ in batch], special_tokens)
        for (text, _, is_last), tokens_N in zip(batch, encoded, strict=True):
            parts.append(tokens_N)
            if is_last:
                start, end = (np.array(ids, tokens_N.dtype) for ids in (tokenizer.start_ids, [tokenizer.end_id]))
                yield EncodedDocument(hash_text(text), np.concatenate([start, *parts, end]), len(text.encode()) + 1)
                parts.clear()


def hash_text(text: str) -> int:
    """The `hash` of an `EncodedDocument`."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def split_lines(text: str) -> Iterator[tuple[str, bool]]:
    """Yield a text in pieces of whole lines, and whether it is the last. A line longer than a piece is divided."""
    first = 0
    while len(text) - first > PIECE:
        stop = text.rfind("\n", first, first + PIECE) + 1 or first + PIECE
        yield text[first:stop], False
        first = stop
    yield text[first:], True
