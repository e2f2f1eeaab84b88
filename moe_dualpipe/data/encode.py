"""Encode documents: several at once if they are short, and one in pieces if it is long. A chat is one document."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice

import numpy as np

from .chats import NO_TEMPLATE, Chat, ChatOptions
from .samples import LABEL, START
from .tokenizer import Tokenizer

PIECE = 1 << 20
"""Characters of a piece, at most. A tokenizer needs many times the memory of its text."""
BATCH_PIECES = 32


@dataclass(frozen=True, slots=True)
class EncodedDocument:
    """The form in which every reader gives a document: its token ids, with the end token of a text.

    hash: the first 8 bytes of BLAKE2b of its UTF-8 text, as an unsigned big-endian number. text_bytes: of the text,
    counting the end token as one byte. flags_N: of the tokens of a chat (samples.py), which ends with the last token to
    train on. place: where a chat comes from.
    """

    hash: int
    tokens_N: np.ndarray
    text_bytes: int
    flags_N: np.ndarray | None = None
    place: str = ""


def encode_documents(
    documents: Iterable[str | Chat], tokenizer: Tokenizer, special_tokens: bool = False,
    chats: ChatOptions = NO_TEMPLATE,
) -> Iterator[EncodedDocument]:  # fmt: skip
    """Encode documents, a text between the tokenizer's start and end tokens. special_tokens: as for `encode_batch`.

    Memory holds the tokens of one document, and the texts of a batch. Raises ValueError for a chat that cannot be
    encoded, and for chats among texts.
    """
    kinds = groupby(documents, lambda document: isinstance(document, Chat))
    for number, (are_chats, group) in enumerate(kinds):
        if number:
            raise ValueError("a source has rows with chats and rows with text: divide it into two sources")
        encoded: Iterable[EncodedDocument] = (
            _encode_chats(group, tokenizer, chats) if are_chats else _encode_texts(group, tokenizer, special_tokens)  # type: ignore[arg-type]
        )
        yield from encoded


def _encode_chats(chats: Iterable[Chat], tokenizer: Tokenizer, options: ChatOptions) -> Iterator[EncodedDocument]:
    chats = iter(chats)
    while batch := [*islice(chats, BATCH_PIECES)]:
        for chat, (text, ids_N, labeled_N) in zip(batch, options.encode(batch, tokenizer), strict=True):
            labels = np.flatnonzero(labeled_N[1:])
            if not len(labels):
                raise ValueError(f"{chat.place}: the chat has no token to train on")
            flags_N = (labeled_N * LABEL).astype(np.uint8)
            flags_N[0] |= START
            size = labels[-1] + 2
            yield EncodedDocument(
                hash_text(chat.text), ids_N[:size], len(text.encode()) + 1, flags_N[:size], chat.place
            )  # fmt: skip


def _encode_texts(texts: Iterable[str], tokenizer: Tokenizer, special_tokens: bool) -> Iterator[EncodedDocument]:
    pieces, parts = ((text, *piece) for text in texts for piece in split_lines(text)), list[np.ndarray]()
    while batch := [*islice(pieces, BATCH_PIECES)]:
        encoded = tokenizer.encode_batch([piece for _, piece, _ in batch], special_tokens)
        for (text, _, is_last), tokens_N in zip(batch, encoded, strict=True):
            parts.append(tokens_N)
            if is_last:
                start, end = (np.array(ids, tokens_N.dtype) for ids in (tokenizer.start_ids, [tokenizer.end_id]))
                yield EncodedDocument(hash_text(text), np.concatenate([start, *parts, end]), len(text.encode()) + 1)
                parts.clear()


def text_of(document: str | Chat) -> str:
    """The text whose hash identifies a document."""
    return document.text if isinstance(document, Chat) else document


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
