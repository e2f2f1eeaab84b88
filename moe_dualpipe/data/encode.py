"""Encode documents, and divide them into those to train on and those that are held out.

Short documents are encoded several at once, and a long one in pieces. A chat is one document.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
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
    kinds, place = groupby(documents, lambda document: isinstance(document, Chat)), ""
    for number, (are_chats, group) in enumerate(kinds):
        if number:
            place = next(group).place if are_chats else place  # type: ignore[union-attr]
            raise ValueError(f"{place}: this row is a chat, but others of its source are text: use two sources")
        encoded: Iterable[EncodedDocument] = (
            _encode_chats(group, tokenizer, chats) if are_chats else _encode_texts(group, tokenizer, special_tokens)  # type: ignore[arg-type]
        )
        for document in encoded:
            place = document.place
            yield document


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


# ---- Sides ----
#
# Which documents are held out for validation: a property of their content, so that copies are never on both sides.
#
# About one document in 20 is held out, by a hash of its text. Its name, its place and the other documents do not
# matter, so a document stays on its side when a source grows. In a small source, one side might get no document. There,
# documents are held out in the order of their hashes until they make up 1/20 of the text; of the last one, only the end
# is held out. If other sources have the same documents, these are divided in the same way there.


HELD_OUT = 20  # one document in 20 is held out


def is_held_out(content_hash: int) -> bool:
    """Whether a document is held out, unless its source is small."""
    return content_hash % HELD_OUT == 0


@dataclass(frozen=True, slots=True)
class Split:
    """How much of each document is held out. `small` has the documents of small sources: hash -> fraction."""

    small: dict[int, Fraction]

    @classmethod
    def of(cls, sources: Iterable[Iterable[tuple[int, int]]], shortest: int) -> "Split":
        """The split of sources, each given as the hashes and sizes of its documents.

        shortest: the size that each side of each source should have. A source is small if it has less than 20 different
        documents, or less than `shortest` on one side. Sizes may have any unit.
        """
        small: dict[int, Fraction] = {}
        for source in sources:
            for content_hash, fraction in _fractions_if_small(source, shortest).items():
                small[content_hash] = max(fraction, small.get(content_hash, fraction))
        return cls(small)

    def tail(self, content_hash: int, size: int) -> int:
        """The size, in whole units, of the end of a document that is held out: 0, `size`, or between them."""
        fraction = self.small.get(content_hash)
        return size * is_held_out(content_hash) if fraction is None else -int(-size * fraction // 1)

    def divide(self, document: EncodedDocument) -> tuple[EncodedDocument, EncodedDocument]:
        """The part of a document that is trained on, and the part that is held out. One of them may have no tokens."""
        cut = len(document.tokens_N) - self.tail(document.hash, len(document.tokens_N))
        if document.flags_N is not None and cut < len(document.tokens_N):  # a chat is not divided
            cut = 0
        tokens_N, flags_N = document.tokens_N, document.flags_N
        head, tail = (
            replace(document, tokens_N=tokens_N[part], flags_N=None if flags_N is None else flags_N[part])
            for part in (slice(cut), slice(cut, None))
        )
        return head, tail


def held_out_size(total: int, shortest: int) -> int:
    """The size to hold out of a small source: 1/20, at least `shortest`, but at most half."""
    return max(total // HELD_OUT, min(shortest, total // 2))


def _fractions_if_small(source: Iterable[tuple[int, int]], shortest: int) -> dict[int, Fraction]:
    """The fraction of each document that is held out; {} if the source is not small."""
    sizes: Counter[int] = Counter()
    sides = [0, 0]
    for content_hash, size in source:
        sides[is_held_out(content_hash)] += size
        sizes[content_hash] += size  # with its copies
        if len(sizes) >= HELD_OUT and min(sides) >= shortest:
            return {}  # not small; the rest is not read
    left, fractions = held_out_size(sizes.total(), shortest), {}
    for content_hash in sorted(sizes):
        taken = min(left, sizes[content_hash])
        fractions[content_hash] = Fraction(taken, sizes[content_hash])
        left -= taken
    return fractions
