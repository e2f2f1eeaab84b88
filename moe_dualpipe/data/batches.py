"""Training batches: random windows of token streams, as a pure function of (seed, step).

A resumed run therefore needs no data-loader state, and every pipeline rank can build the same batch without
communication. A stream is all documents of a source in order, each followed by the end-of-document id. A sequence is a
window anywhere in a stream, so it may span several documents. With several sources, each sequence first draws its
source by weight.

B sequences of a step, N validation sequences, S positions, V vocabulary.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..messages import plural, printable
from .samples import Samples, Text
from .token_files import TokensOnDisk, vocabulary_error
from .tokenizer import BYTES, Tokenizer, digest, find_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from ..pipeline.labels import Batch


FINGERPRINT_PARTS, FINGERPRINT_TOKENS = 256, 64  # read of a file

MANY_SOURCES = 8  # more are described on one line
QUOTE = "quote a glob, as in 'notes/*.md', to make it one source"


@dataclass(frozen=True)
class Source:
    """One entry of --data: its training and held-out token streams, and its sampling weight.

    description: more about it, for messages.
    """

    name: str
    weight: float
    train: Text | Samples
    held_out: Text | Samples
    description: str
    bytes_per_token: float | None = 1.0
    """Mean over the held-out text, counting the end of a document as one byte. None if the tokenizer is unknown."""


@dataclass(frozen=True)
class TextData:
    """The sources of a run and their common tokenizer; draws the batches."""

    sources: tuple[Source, ...]
    tokenizer: Tokenizer = BYTES
    document_mask: bool = False
    """Number the documents of text, too, and ignore the label of the token that ends a document."""
    has_held_out: ClassVar[bool] = True
    last: ClassVar[tuple[()]] = ()
    """Nothing to compare between ranks: batches are a function of the seed and the step."""

    @property
    def all_labeled(self) -> bool:
        """Whether no label is -100."""
        return not self.document_mask and all(source.train.all_labeled for source in self.sources)

    def batch(self, seed: int, step: int, count: int, seq_len: int, rows: range | None = None) -> "Batch":
        """Draw the `count` sequences of a step: inputs and labels, each [B, S] int64.

        rows: the sequences to read; None: all. A step has the same sequences whichever rows a rank reads.
        """
        random = np.random.Generator(np.random.Philox(key=[seed, step << 20]))
        streams = [source.train for source in self.sources]
        if len(streams) > 1:
            streams = [streams[i] for i in random.choice(len(streams), count, p=self.shares)]
            starts = random.integers(0, [stream.num_places(seq_len) for stream in streams])
        else:
            streams, starts = streams * count, random.integers(0, streams[0].num_places(seq_len), count)
        own = slice(None) if rows is None else slice(rows.start, rows.stop)
        windows = [
            (stream, stream.drawn(seed, step * count + i, start))
            for i, (stream, start) in enumerate(zip(streams, starts.tolist(), strict=True))
        ]
        return self._read(windows[own], seq_len)

    def held_out_batch(self, first: int, count: int, total: int, seq_len: int) -> "Batch":
        """Return sequences `first` to `first + count` of `total`, spaced evenly over the held-out text.

        Each source gets its share of `total`, rounded, so its weight is the same in the validation and training losses.
        """
        bounds = np.rint(np.cumsum([0.0, *self.shares]) * total).astype(int)
        windows = [
            (source.held_out, start)
            for source, sequences in zip(self.sources, np.diff(bounds), strict=True)
            for start in source.held_out.spaced(sequences, seq_len).tolist()
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
            for stream in (*source.train.streams, *source.held_out.streams):
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

    def _read(self, windows: Sequence[tuple[Text | Samples, int]], seq_len: int) -> "Batch":
        import torch  # not at the top: `moe-dualpipe data` starts faster without it

        from ..pipeline.labels import Batch

        shape = len(windows), seq_len
        inputs, labels, documents = (torch.full(shape, value, dtype=torch.int64) for value in (0, -100, -1))
        for (stream, place), *row in zip(windows, inputs.numpy(), labels.numpy(), documents.numpy(), strict=True):
            stream.read(place, *row)
        for part in {part for stream, _ in windows for part in stream.streams if isinstance(part, TokensOnDisk)}:
            part.file.check_unchanged()  # checked after reading, so these tokens are those from the start of the run
        largest, size = torch.maximum(inputs.amax(1), labels.amax(1)), self.tokenizer.vocab_size
        if (largest >= size).any():  # the file was too large to scan
            row = int(largest.argmax())
            tokens, start = windows[row][0].streams[0], windows[row][1]
            name, first = (tokens.file.path, tokens.first) if isinstance(tokens, TokensOnDisk) else ("the text", 0)
            raise vocabulary_error(name, first + start, np.append(inputs[row], labels[row, -1]), size)
        if self.document_mask:
            of_text = [row for row, (stream, _) in enumerate(windows) if stream.all_labeled]
            numbered = batch_of(inputs[of_text], labels[of_text], self.tokenizer.end_id)
            labels[of_text], documents[of_text] = numbered.labels, numbered.tensors["documents"]
        # If a sequence may have several samples, all batches have documents.
        with_documents = self.document_mask or any(source.train.packing for source in self.sources)
        return Batch(inputs, labels, documents if with_documents else None)


def batch_of(inputs_BS: "Tensor", labels_BS: "Tensor", end_id: int | None) -> "Batch":
    """A batch; with the token `end_id`, which ends a document, also the numbers of its documents.

    The label of the end of a document is ignored.
    Example: end_id=0, inputs [5, 0, 7, 0, 0, 8] -> documents [0, 0, 1, 1, 2, 3].
    """
    from ..pipeline.labels import Batch

    if end_id is None:
        return Batch(inputs_BS, labels_BS)
    ends_BS = inputs_BS == end_id
    return Batch(inputs_BS, labels_BS.masked_fill(ends_BS, -100), ends_BS.cumsum(1) - ends_BS.long())


def _size(sources: Sequence[Source]) -> str:
    tokens, held_out = (sum(len(getattr(source, side)) for source in sources) for side in ("train", "held_out"))
    return f"{plural(tokens, 'token')}, {held_out:,} held out"


# ---- Batches from a program instead of text ----

Batches = Callable[[int], "tuple[Tensor, Tensor] | Batch"]
"""(number of steps before this one) -> inputs and labels of the whole step, each [B, S], and perhaps the numbers of
documents. The same on all ranks."""


class GivenBatches:
    """Stands in for `TextData`: gives each data-parallel rank its sequences of a step.

    shape: [B, S] of a step. vocab_size: of the model. validation: inputs and labels, each [N, S], where N is a multiple
    of B; None: no validation. tokenizer: for samples, and saved in checkpoints. first_step: the number of steps before
    the first one, for `fingerprint`. document_mask: as for `TextData`.

    Raises ValueError for validation sequences of another shape, with invalid ids, or without any label.
    """

    description = "data: batches of the program"
    all_labeled = False

    def __init__(
        self, batches: Batches, shape: tuple[int, int], vocab_size: int, tokenizer: Tokenizer,
        validation: "tuple[Tensor, Tensor] | Batch | None" = None, first_step: int = 0, document_mask: bool = False,
    ):  # fmt: skip
        self.batches, self.shape, self.vocab_size, self.tokenizer = batches, shape, vocab_size, tokenizer
        self.first_step, self._end_id = first_step, tokenizer.end_id if document_mask else None
        self._last: tuple[int, Batch] | None = None
        self.validation = None if validation is None else self._checked("validation", validation, multiple=True)

    def batch(self, seed: int, step: int, count: int, seq_len: int, rows: range | None = None) -> "Batch":
        """Sequences `rows` of a step, or all: inputs and labels, each [B, S]."""
        whole = self.whole(step)
        return whole if rows is None else whole.rows(rows.start, rows.stop)

    def held_out_batch(self, first: int, count: int, total: int, seq_len: int) -> "Batch":
        """Validation sequences `first` to `first + count`."""
        assert self.validation is not None
        return self.validation.rows(first, first + count)

    def whole(self, step: int) -> "Batch":
        """All sequences of a step. Calls `batches` once, even if a step is run again.

        Raises ValueError for a batch of another shape, with ids outside the vocabulary, or without any label.
        """
        if self._last is None or self._last[0] != step:
            self._last = step, self._checked(f"batches({step})", self.batches(step))
        return self._last[1]

    @property
    def has_held_out(self) -> bool:
        return self.validation is not None

    def format_losses(self, *losses: float) -> str:
        """Format losses, given in nats per token: "5.5733 -> 1.8350 nats per token"."""
        return f"{' -> '.join(f'{loss:.4f}' for loss in losses)} nats per token"

    def fingerprint(self) -> int:
        """A 63-bit hash of the first batch and of the validation sequences: all ranks must pass the same ones."""
        content = hashlib.blake2b(digest_size=8)
        batches = self.whole(self.first_step), *([self.validation] if self.validation else ())
        for tensor in (tensor for batch in batches for tensor in batch.tensors.values()):
            content.update(tensor.cpu().contiguous().numpy().data)
        return int.from_bytes(content.digest()) >> 1

    @property
    def last(self) -> "tuple[Tensor, ...]":
        """The last batch, which must be the same on all ranks."""
        return tuple(self._last[1].tensors.values()) if self._last else ()

    def _checked(self, name: str, pair: Any, multiple: bool = False) -> "Batch":
        """The pair, as int64. Raises ValueError that starts with `name`. multiple: any multiple of B sequences."""
        import torch  # not at the top: `moe-dualpipe data` starts faster without it

        from ..pipeline.labels import Batch, token_ids

        number, length = self.shape
        tensors = [t for t in pair if t is not None] if isinstance(pair, tuple | list) else [pair]
        shapes = [[*t.shape] if isinstance(t, torch.Tensor) else type(t).__name__ for t in tensors]
        wanted = f"(inputs, labels), each {'a multiple of ' * multiple}[{number}, {length}]"
        rows = shapes[0][0] if multiple and shapes and isinstance(shapes[0], list) and shapes[0] else number
        if shapes not in ([[rows, length]] * 2, [[rows, length]] * 3) or not rows or rows % number:
            hint = "; make tensors of arrays with torch.as_tensor()" * ("ndarray" in shapes)
            raise ValueError(f"{name} must be {wanted}: got {', '.join(map(str, shapes))}{hint}")
        inputs, labels, *documents = (
            token_ids(f"{name}: {k}", t) for k, t in zip(("inputs", "labels", "documents"), tensors, strict=False)
        )
        for kind, tensor, low in (("inputs", inputs, 0), ("labels", labels, -100)):
            if tensor.is_cuda:  # the host would wait for the result
                continue
            valid = (tensor >= 0) & (tensor < self.vocab_size) | (tensor == low)
            if not valid.all():
                wrong, also = tensor[~valid][0].item(), ", or -100 for one to ignore" * (low < 0)
                raise ValueError(f"{name}: {kind} must be from 0 to {self.vocab_size - 1}{also}: got {wrong}")
        if not (labels >= 0).any():
            raise ValueError(f"{name} has no label: all of them are -100, so there is no loss")
        return Batch(inputs, labels, *documents) if documents else batch_of(inputs, labels, self._end_id)
