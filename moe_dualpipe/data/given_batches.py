"""Batches that a program makes itself, in place of text.

B sequences of a step on all data-parallel ranks, N validation sequences, S positions, V vocabulary.
"""

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

Batches = Callable[[int], "tuple[Tensor, Tensor]"]
"""(number of steps before this one) -> inputs and labels of the whole step, each [B, S]. The same on all ranks."""


class GivenBatches:
    """Stands in for `TextData`: gives each data-parallel rank its sequences of a step.

    shape: [B, S] of a step. vocab_size: of the model. validation: inputs and labels, each [N, S], where N is a multiple
    of B; None: no validation. tokenizer: for samples, and saved in checkpoints. first_step: the number of steps before
    the first one, for `fingerprint`.

    Raises ValueError for validation sequences of another shape, with invalid ids, or without any label.
    """

    description = "data: batches of the program"

    def __init__(
        self, batches: Batches, shape: tuple[int, int], vocab_size: int, tokenizer: Tokenizer,
        validation: "tuple[Tensor, Tensor] | None" = None, first_step: int = 0,
    ):  # fmt: skip
        self.batches, self.shape, self.vocab_size, self.tokenizer = batches, shape, vocab_size, tokenizer
        self.first_step = first_step
        self._last: tuple[int, tuple[Tensor, Tensor]] | None = None
        self.validation = None if validation is None else self._checked("validation", validation, multiple=True)

    def batch(
        self, seed: int, step: int, count: int, seq_len: int, rows: range | None = None
    ) -> "tuple[Tensor, Tensor]":
        """Sequences `rows` of a step, or all: inputs and labels, each [B, S]."""
        inputs_BS, labels_BS = self.whole(step)
        own = slice(None) if rows is None else slice(rows.start, rows.stop)
        return inputs_BS[own], labels_BS[own]

    def num_labels(self, step: int, count: int, seq_len: int) -> int:
        """The number of labels of a step that are not ignored."""
        return int((self.whole(step)[1] >= 0).sum())

    def num_held_out_labels(self, count: int, seq_len: int) -> int:
        """The number of validation labels that are not ignored."""
        assert self.validation is not None
        return int((self.validation[1] >= 0).sum())

    def held_out_batch(self, first: int, count: int, total: int, seq_len: int) -> "tuple[Tensor, Tensor]":
        """Validation sequences `first` to `first + count`."""
        assert self.validation is not None
        inputs_NS, labels_NS = self.validation
        return inputs_NS[first : first + count], labels_NS[first : first + count]

    def whole(self, step: int) -> "tuple[Tensor, Tensor]":
        """All sequences of a step. Calls `batches` once, also if a step is run again.

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
        for tensor in (*self.whole(self.first_step), *(self.validation or ())):
            content.update(tensor.cpu().contiguous().numpy().data)
        return int.from_bytes(content.digest()) >> 1

    def _checked(self, name: str, pair: Any, multiple: bool = False) -> "tuple[Tensor, Tensor]":
        """The pair, as int64. Raises ValueError that starts with `name`. multiple: any multiple of B sequences."""
        import torch  # not at the top: `moe-dualpipe data` starts faster without it

        number, length = self.shape
        tensors = pair if isinstance(pair, tuple | list) else [pair]
        shapes = [[*t.shape] if isinstance(t, torch.Tensor) else type(t).__name__ for t in tensors]
        wanted = f"(inputs, labels), each {'a multiple of ' * multiple}[{number}, {length}]"
        rows = shapes[0][0] if multiple and shapes and isinstance(shapes[0], list) and shapes[0] else number
        if shapes != [[rows, length]] * 2 or not rows or rows % number:
            raise ValueError(f"{name} must be {wanted}: got {', '.join(map(str, shapes))}")
        for kind, tensor, low in (("inputs", tensors[0], 0), ("labels", tensors[1], -100)):
            if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
                raise ValueError(f"{name}: {kind} must be token ids, integers: got {tensor.dtype}")
            if tensor.is_cuda:  # the host would wait for the result
                continue
            valid = (tensor >= 0) & (tensor < self.vocab_size) | (tensor == low)
            if not valid.all():
                wrong, also = tensor[~valid][0].item(), ", or -100 for one to ignore" * (low < 0)
                raise ValueError(f"{name}: {kind} must be from 0 to {self.vocab_size - 1}{also}: got {wrong}")
        inputs, labels = (tensor.to(torch.int64) for tensor in tensors)
        if not (labels >= 0).any():
            raise ValueError(f"{name} has no label: all of them are -100, so there is no loss")
        return inputs, labels
