"""What sequences are made of: windows of a stream of text, or samples, such as chats, which are read as wholes.

Samples of a sequence do not see each other, because a batch has the numbers of its documents. A sample of n tokens
needs n - 1 positions: its last token is only a label. They are packed once, by best fit in decreasing order within a
window of samples, which leaves little padding. Each pass over the sequences has an order of its own, which depends only
on the seed and the pass.

N tokens, D samples, S positions of a sequence.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from ..messages import plural
from .chats import ChatOptions
from .token_files import TokenStream

LABEL, START = 1, 2
"""Flags of a token: train on it; it is the first of a sample."""
WINDOW = 4096


class Text:
    """A stream of tokens, all of them labels. A sequence is a window anywhere in it."""

    all_labeled, packing, description = True, False, ""

    def __init__(self, tokens_N: TokenStream):
        self.streams = (tokens_N,)

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.streams[0])

    def num_places(self, seq_len: int) -> int:
        """The number of places where a sequence may start."""
        return len(self) - seq_len

    def drawn(self, _seed: int, _number: int, drawn: int) -> int:
        """The place of the sequence with this number of a run. drawn: a random place."""
        return drawn

    def spaced(self, number: int, seq_len: int) -> np.ndarray:
        """The places of `number` sequences, spaced evenly."""
        return np.linspace(0, len(self) - seq_len - 1, number).astype(np.int64)

    def read(self, place: int, inputs_S: np.ndarray, labels_S: np.ndarray, documents_S: np.ndarray) -> None:
        """Fill in the sequence at a place, as one document."""
        tokens = self.streams[0][place : place + len(inputs_S) + 1]
        inputs_S[:], labels_S[:], documents_S[:] = tokens[:-1], tokens[1:], 0


class Samples:
    """Samples in their order, and the sequences of `seq_len` positions into which they are packed.

    tokens_N, flags_N: token ids, and a byte of flags for each. place: where the sample with this number comes from.
    Raises ValueError for a sample that is too long, if `options` do not say what to do with it.
    """

    all_labeled = False

    def __init__(
        self, tokens_N: TokenStream, flags_N: TokenStream, seq_len: int, options: ChatOptions,
        place: Callable[[int], str],
    ):  # fmt: skip
        self.streams, self.seq_len, self.packing = (tokens_N, flags_N), seq_len, options.packing
        flags = flags_N[:]
        if options.train_on == "all" and not (flags & LABEL).all():
            raise ValueError(
                f"{place(0)}: prepared for train_on=assistant: prepare the chats again with --train-on all"
            )
        self.firsts_D = np.flatnonzero(flags & START)
        self.sizes_D = np.diff(self.firsts_D, append=len(flags)) - 1
        long_D = np.flatnonzero(self.sizes_D > seq_len)
        if len(long_D) and options.too_long == "error":
            raise ValueError(
                f"{place(long_D[0])}: {plural(int(self.sizes_D[long_D[0]]) + 1, 'token')} do not fit into --seq-len "
                f"{seq_len}: use --seq-len {self.sizes_D.max()}, or --set batch.too_long=cut or drop"
            )
        labeled_D = np.array([(flags[at + 1 : at + 1 + seq_len] & LABEL).any() for at in self.firsts_D[long_D]], bool)
        dropped = long_D if options.too_long == "drop" else long_D[~labeled_D]  # a cut may leave no label
        self.sizes_D = self.sizes_D.clip(max=seq_len)
        self.long = {"cut": len(long_D) - len(dropped), "dropped": len(dropped)}
        kept_D = np.setdiff1d(np.arange(len(self.firsts_D)), dropped)
        packed = pack(self.sizes_D[kept_D].tolist(), seq_len if options.packing else 0)
        self.sequences = [[int(kept_D[i]) for i in sorted(each)] for each in packed]

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.streams[0])

    def num_places(self, _seq_len: int) -> int:
        return len(self.sequences)

    def drawn(self, seed: int, number: int, _drawn: int) -> int:
        """The sequence with this number of a run, from 0. Each pass has every sequence once."""
        turn, place = divmod(number, len(self.sequences))
        return int(_order(seed, turn, len(self.sequences))[place])

    def spaced(self, number: int, _seq_len: int) -> np.ndarray:
        """Of few packed sequences, each is used about as often."""
        return np.arange(number) * len(self.sequences) // max(number, 1)

    def read(self, sequence: int, inputs_S: np.ndarray, labels_S: np.ndarray, documents_S: np.ndarray) -> None:
        """Fill in a sequence. Positions without a sample keep their values."""
        at = 0
        for number, sample in enumerate(self.sequences[sequence]):
            first, size = int(self.firsts_D[sample]), int(self.sizes_D[sample])
            tokens, flags = (stream[first : first + size + 1] for stream in self.streams)
            part, at = slice(at, at + size), at + size
            inputs_S[part], documents_S[part] = tokens[:-1], number
            labels_S[part] = np.where(flags[1:] & LABEL, tokens[1:].astype(np.int64), -100)

    @property
    def description(self) -> str:
        """The samples, the sequences and the padding, in one line."""
        samples = [sample for each in self.sequences for sample in each]
        used, count = int(self.sizes_D[samples].sum()), len(self.sequences)
        alone, packed = (1 - used / max(number * self.seq_len, 1) for number in (len(samples), count))
        text = f"{plural(len(samples), 'chat')} in {plural(count, 'sequence')}, {alone:.1%} padding"
        text += f" before packing and {packed:.1%} after" if self.packing else ""
        return text + "".join(f"; {number:,} too long, {what}" for what, number in self.long.items() if number)


def pack(sizes: list[int], limit: int) -> list[list[int]]:
    """Divide items into groups with a sum of at most `limit`, or of one item: the indices of each.

    The largest item comes first, into the fullest group that has space, among those of the same WINDOW of items.
    Example: sizes 3, 5, 2, 4 and limit 7 -> [[1, 2], [3, 0]].
    """
    groups: list[list[int]] = []
    for first in range(0, len(sizes), WINDOW):
        window, spaces = range(first, min(first + WINDOW, len(sizes))), list[tuple[int, int]]()
        for item in sorted(window, key=lambda item: -sizes[item]):
            if (at := bisect_left(spaces, (sizes[item], -1))) < len(spaces):
                space, group = spaces.pop(at)
            else:
                space, group = limit, len(groups)
                groups.append([])
            groups[group].append(item)
            if space > sizes[item]:
                insort(spaces, (space - sizes[item], group))
    return groups


@lru_cache(maxsize=8)
def _order(seed: int, turn: int, count: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=[seed, (turn << 20) + 1])).permutation(count)
