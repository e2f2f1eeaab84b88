"""Streams of token ids, and batches that are a pure function of (seed, step, rank).

Because a batch depends on nothing else, a run that resumes needs no loader state, and every pipeline rank can make the
same batch for itself: nothing but hidden states travels. A stream is documents, each ended by `end_id`, one after the
other; a sequence is a window anywhere in it. Of several sources one is drawn for each sequence, by their weights.

B sequences, S positions.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from . import tokenizer as tokenizers
from .documents import Documents, held_out_tail, is_held_out
from .token_files import HELD_OUT_NAMES, SCANNED, TRAIN, TokenFile, past_vocabulary
from .tokenizer import BYTES, Ids, Tokenizer, num_bytes


@dataclass(frozen=True)
class Source:
    """Two streams of token ids, how often sequences come from them, and where they came from."""

    name: str
    weight: float
    train: np.ndarray
    held_out: np.ndarray
    description: str
    bytes_per_token: float | None = 1.0
    """In the held-out text, where the end of a document counts as one byte; None: not known."""


@dataclass(frozen=True)
class TextData:
    """What to train on."""

    sources: tuple[Source, ...]
    tokenizer: Tokenizer = BYTES

    def batch(self, seed: int, step: int, rank: int, count: int, seq_len: int) -> tuple[Tensor, Tensor]:
        """`count` random training sequences for data-parallel rank `rank`: inputs and labels, each [B, S] int64."""
        random = np.random.Generator(np.random.Philox(key=[seed, (step << 20) + rank]))
        streams = [source.train for source in self.sources]
        if len(streams) > 1:
            streams = [streams[i] for i in random.choice(len(streams), count, p=self.shares)]
            starts = random.integers(0, [len(stream) - seq_len for stream in streams])
        else:
            streams, starts = streams * count, random.integers(0, len(streams[0]) - seq_len, count)
        return self._windows(zip(streams, starts.tolist(), strict=True), seq_len)

    def held_out_batch(self, first: int, count: int, total: int, seq_len: int) -> tuple[Tensor, Tensor]:
        """Sequences `first` to `first + count` of `total` that are spread evenly over the held-out text.

        Each source has its share of them, rounded, so that their mean loss is weighted as the training loss is.
        """
        bounds = np.rint(np.cumsum([0.0, *self.shares]) * total).astype(int)
        windows = [
            (source.held_out, start)
            for source, sequences in zip(self.sources, np.diff(bounds), strict=True)
            for start in np.linspace(0, len(source.held_out) - seq_len - 1, sequences).astype(np.int64).tolist()
        ]
        return self._windows(windows[first : first + count], seq_len)

    @property
    def shares(self) -> list[float]:
        """The part of all sequences that comes from each source; they sum to 1."""
        total = math.fsum(source.weight for source in self.sources)
        return [source.weight / total for source in self.sources]

    @property
    def end_id(self) -> int:
        """The token that ends every document; -1 where it is not known."""
        return self.tokenizer.end_id

    @property
    def description(self) -> str:
        """A line for each source, and one for the tokenizer unless that is bytes."""
        lines = [
            f"data {source.name}{f' ({share:.1%} of the sequences)' if len(self.sources) > 1 else ''}: "
            f"{source.description}"
            for source, share in zip(self.sources, self.shares, strict=True)
        ]
        if self.tokenizer is not BYTES:
            size = self.bytes_per_token
            lines.append(f"tokenizer: {self.tokenizer}{f', {size:.2f} bytes per token' if size else ''}")
        return "\n".join(lines)

    @property
    def bytes_per_token(self) -> float | None:
        """Of held-out text, weighted as its sequences are; None: not known."""
        sizes = [source.bytes_per_token for source in self.sources]
        return sum(s * share for s, share in zip(sizes, self.shares, strict=True) if s) if all(sizes) else None

    def in_words(self, *losses: float) -> str:
        """Losses, in nats per token, for people: "5.5733 -> 1.8350 nats per byte", whatever the tokens are."""
        per_token = " -> ".join(f"{loss:.4f}" for loss in losses)
        if self.tokenizer is BYTES:
            return f"{per_token} nats per byte"
        if (size := self.bytes_per_token) is None:
            return f"{per_token} nats per token"
        return f"{per_token} nats per token, {' -> '.join(f'{loss / size:.4f}' for loss in losses)} nats per byte"

    def files(self) -> dict[str, bytes]:
        """What a checkpoint keeps of it, file name -> content, for `tokenizer_of`."""
        return tokenizers.files(self.tokenizer)

    def check_resumed(self, checkpoint: Path) -> None:
        """Raises ValueError if the model in `checkpoint`, or in an exported folder, has learned other tokens."""
        before = tokenizers.tokenizer_of(checkpoint)
        if tokenizers.digest(before) != tokenizers.digest(self.tokenizer):
            raise ValueError(f"{checkpoint} was trained on other tokens: {before} there and {self.tokenizer} here")

    def _windows(self, windows: Iterable[tuple[np.ndarray, int]], seq_len: int) -> tuple[Tensor, Tensor]:
        windows = list(windows)
        rows = np.stack([stream[start : start + seq_len + 1] for stream, start in windows]).astype(np.int64)
        if rows.max() >= self.tokenizer.vocab_size:  # in a file that was too large to be scanned, or has changed since
            row = int(np.argmax(rows.max(1) >= self.tokenizer.vocab_size))
            stream, start = windows[row]
            where = getattr(stream, "filename", "the text")
            raise past_vocabulary(where, start, rows[row], self.tokenizer.vocab_size)
        tokens = torch.from_numpy(rows)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def load(
    sources: str | Sequence[str],
    seq_len: int,
    vocab_size: int | None = None,
    field: str = "text",
    dtype: str = "uint16",
) -> TextData:
    """The data of `sources`, each "SOURCE" or "SOURCE=WEIGHT".

    A source is text (a file, a folder, a glob, "stdlib"; of .jsonl files the strings under `field`), a folder that
    `prepare` made, or a .bin of token ids (of `dtype`, if nothing beside it says). Text is encoded by the tokenizer of
    the token ids among the sources, and as bytes if there are none.
    vocab_size: of the model; None: large enough. Raises ValueError when there is nothing to read, too little for one
    sequence of `seq_len`, something that is not what it should be, or more than one tokenizer.
    """
    entries = [weighted(entry) for entry in ([sources] if isinstance(sources, str) else sources)]
    if not entries:
        raise ValueError('--data is empty: name a file, a folder, a glob, or "stdlib"')
    opened = {name: list(_token_files(name, dtype)) for name, _ in entries}
    tokenizer = _tokenizer(opened, vocab_size or np.iinfo(dtype).max + 1)
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        who = "bytes need" if tokenizer is BYTES else f"{tokenizer}, in --data, needs"
        raise ValueError(f"{who} --model.vocab-size {tokenizer.vocab_size}: got {vocab_size}")
    return TextData(
        tuple(
            _mapped(name, weight, opened[name], tokenizer, seq_len)
            if opened[name]
            else _encoded(name, weight, Documents.find(name, field), tokenizer, seq_len)
            for name, weight in entries
        ),
        tokenizer,
    )


def weighted(entry: str) -> tuple[str, float]:
    """ "notes=2.5" -> ("notes", 2.5); without a weight, or where a file has that very name, 1."""
    name, equals, weight = entry.rpartition("=")
    if not equals or Path(entry).exists():
        name, weight = entry, "1"
    try:
        number = float(weight)
    except ValueError:
        name, number = entry, 1.0  # the name has a "=" of its own
    if not 0 < number < math.inf:
        raise ValueError(f"--data {entry}: a weight must be a positive number: got {weight}; leave the source out")
    if not name:
        raise ValueError('--data is empty: name a file, a folder, a glob, or "stdlib"')
    return name, number


def _token_files(name: str, dtype: str) -> Iterator[TokenFile]:
    """What to train on, and what is held out, where `name` stands for token ids."""
    path = Path(name) / TRAIN if (Path(name) / TRAIN).is_file() else Path(name)
    if path.suffix == ".bin" and path.is_file():
        yield TokenFile.open(path, dtype)
        beside = [other for name in HELD_OUT_NAMES if (other := path.with_name(name)).is_file()]
        if path.name == TRAIN and beside:
            yield TokenFile.open(beside[0], dtype)


def _tokenizer(opened: dict[str, list[TokenFile]], vocab_size: int) -> Tokenizer:
    found = [(file.path, file.tokenizer(vocab_size)) for files in opened.values() for file in files]
    for path, tokenizer in found:
        if tokenizers.digest(tokenizer) != tokenizers.digest(found[0][1]):
            raise ValueError(
                f"one model cannot read two tokenizers: {found[0][0]} has {found[0][1]}, and {path} {tokenizer}; "
                f"prepare one with the other's {tokenizers.FILE}"
            )
    chosen = found[0][1] if found else BYTES
    if isinstance(chosen, Ids) and not all(opened.values()):
        raise ValueError(
            f"{found[0][0]} has no {tokenizers.FILE} beside it, by which the text in --data could be encoded"
        )
    return chosen


def _mapped(name: str, weight: float, files: list[TokenFile], tokenizer: Tokenizer, seq_len: int) -> Source:
    for file in files:
        if file.tokens_N.nbytes <= SCANNED:
            file.scan(tokenizer.vocab_size)
    streams = [file.tokens_N for file in files]
    if len(streams) == 1:
        cut = len(streams[0]) - held_out_tail(len(streams[0]), seq_len)
        streams = [streams[0][:cut], streams[0][cut:]]
    train, held_out = streams
    size, sidecar = None, files[-1].sidecar
    if sidecar:
        size = sidecar.bytes / sidecar.tokens
    elif not isinstance(tokenizer, Ids):
        some = held_out[: 1 << 20]
        size = num_bytes(tokenizer, some) / len(some)
    words = f"{len(train):,} tokens, {len(held_out):,} held out"
    _check_length(name, train, held_out, seq_len, "tokens")
    return Source(name, weight, train, held_out, words, size)


def _encoded(name: str, weight: float, documents: Documents, tokenizer: Tokenizer, seq_len: int) -> Source:
    encoded = list(_encode(documents, tokenizer))
    if not encoded:
        raise documents.nothing()
    unit, left_out = documents.unit, documents.left_out()
    parts = ([d for i, d in enumerate(encoded) if is_held_out(i, len(encoded)) == held] for held in (False, True))
    kept, held = parts
    if held:
        train, held_out = np.concatenate(kept), np.concatenate(held)
        words = f"{len(kept)} {unit} ({_amount(len(train), tokenizer)}), {len(held)} held out{left_out}"
    else:
        stream = np.concatenate(kept)
        cut = len(stream) - held_out_tail(len(stream), seq_len)
        train, held_out = stream[:cut], stream[cut:]
        what = "bytes" if tokenizer is BYTES else "tokens"
        amount = _amount(len(stream), tokenizer)
        words = f"{len(kept)} {unit} ({amount}), the last {len(held_out)} {what} held out{left_out}"
    _check_length(name, train, held_out, seq_len, "bytes" if tokenizer is BYTES else "tokens")
    size = num_bytes(tokenizer, held_out) / len(held_out)
    return Source(name, weight, train, held_out, words, size)


def _encode(documents: Documents, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Each document's tokens, with its end."""
    pieces: list[np.ndarray] = []
    for piece in documents:
        pieces += tokenizer.arrays([piece.text])
        if piece.last:
            yield np.append(np.concatenate(pieces), pieces[0].dtype.type(tokenizer.end_id))
            pieces = []


def _amount(length: int, tokenizer: Tokenizer) -> str:
    return f"{length / 1e6:.1f} MB" if tokenizer is BYTES else f"{length:,} tokens"


def _check_length(name: str, train: np.ndarray, held_out: np.ndarray, seq_len: int, unit: str) -> None:
    shortest = min(len(train), len(held_out))
    if shortest < seq_len + 1:
        raise ValueError(
            f"too little text in --data {name}: {len(train)} {unit} to train on and {len(held_out)} held out, "
            f"but one sequence takes {seq_len + 1}; use more text or --seq-len {max(shortest - 1, 1)}"
        )
