"""Encode documents, a few chunks at a time, and several documents at once if they are short."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .held_out import ContentHash
from .text_files import TextChunk
from .tokenizer import Tokenizer, num_bytes

BATCH_CHUNKS, BATCH_CHARACTERS = 64, 1 << 20
"""Encoded at a time, at most."""


@dataclass(frozen=True, slots=True)
class EncodedDocument:
    """The token ids of a document, with that of its end, which counts as one byte of text."""

    hash: int
    tokens_N: np.ndarray
    text_bytes: int

    def bytes_of_tail(self, num_tokens: int, tokenizer: Tokenizer) -> int:
        """The bytes of the text of the last tokens."""
        whole = num_tokens == len(self.tokens_N)
        return self.text_bytes if whole else num_bytes(tokenizer, self.tokens_N[len(self.tokens_N) - num_tokens :])


def encode_documents(chunks: Iterator[TextChunk], tokenizer: Tokenizer) -> Iterator[EncodedDocument]:
    """Encode the chunks of documents. Memory holds the tokens of one document, and the text of some chunks."""
    content_hash, parts, size = ContentHash(), list[np.ndarray](), 1
    while batch := _next_batch(chunks):
        for chunk, tokens_N in zip(batch, tokenizer.encode_batch([chunk.text for chunk in batch]), strict=True):
            content_hash.update(text := chunk.text.encode())
            size += len(text)
            parts.append(tokens_N)
            if chunk.ends_document:
                parts.append(np.array([tokenizer.end_id], tokens_N.dtype))
                yield EncodedDocument(content_hash.value(), np.concatenate(parts), size)
                content_hash, parts, size = ContentHash(), [], 1


def _next_batch(chunks: Iterator[TextChunk]) -> list[TextChunk]:
    batch, characters = list[TextChunk](), 0
    while len(batch) < BATCH_CHUNKS and characters < BATCH_CHARACTERS and (chunk := next(chunks, None)):
        batch.append(chunk)
        characters += len(chunk.text)
    return batch
