"""Which documents are held out for validation: a property of their content, so that copies are never on both sides.

About one document in 20 is held out, by a hash of its text. Its name, its place and the other documents do not matter,
so a document stays on its side when a source grows. In a small source, one side might get no document. There, documents
are held out in the order of their hashes until they make up 1/20 of the text; of the last one, only the end is held
out. If other sources have the same documents, these are divided in the same way there.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

from .encode import EncodedDocument

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
