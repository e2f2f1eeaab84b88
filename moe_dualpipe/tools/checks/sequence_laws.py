"""The laws of layers that map sequences to sequences: attention (`AttentionLayer`) and blocks (`BlockLayer`).

B sequences, S positions, D model dim.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...messages import plural
from ...models.attention import attention_class, document_mask
from ...models.attention_layer import accepted_context, attend
from ...models.block import block_class, block_parts
from ...models.config import ModelConfig, StageOptions
from ...models.kv_cache import KVCache
from ...models.layers import seeded
from ...models.recompute import add_up
from ...overlap import Compute, Segmented, Segments
from . import shared_laws as shared
from .laws import Broken, Law, Unchecked
from .pairs import Interleaved, compare_overlapped
from .subject import Outputs, Subject, check_like, prepare, random_like, row_errors, worst_row

_SEQUENCES, _LENGTH = 3, 8


class Runner(Segmented):
    """Runs a layer as a model does, with its cache and document mask."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer
        self.mask_B1SS: Tensor | None = None
        self.cache: KVCache | None = None


class AttentionRunner(Runner):
    def segments(self, x_BSD: Tensor) -> Segments:  # type: ignore[override]
        return (yield Compute("attn", lambda x: attend(self.layer, 0, x, self.cache, self.mask_B1SS), x_BSD))


class BlockRunner(Runner):
    def segments(self, x_BSD: Tensor) -> Segments:  # type: ignore[override]
        parts = yield from block_parts(self.layer, 0, (x_BSD,), self.cache, self.mask_B1SS)
        return (yield Compute("add", add_up, *parts))


class SequenceLayer(Subject):
    """The attention or the block that `config` names."""

    prefix = "layer."

    def __init__(self, kind: str, config: ModelConfig, device: str = "cpu"):
        super().__init__(config, device)
        self.kind = kind

    def build(self, seed: int) -> nn.Module:
        with seeded(seed, self.kind):
            if self.kind == "attention":
                runner = AttentionRunner(attention_class(self.config).build(self.config, layer=0))
            else:
                experts, options = Interleaved(self.config.num_experts), StageOptions(seed=seed)
                runner = BlockRunner(block_class(self.config).build(self.config, 0, experts, options))
        return prepare(runner, seed, device=self.device)

    def call(self, module: Any, x: Tensor) -> Outputs:
        return check_like(x, module(x), self)

    def draw(self, seed: int) -> Tensor:
        return self.random(seed, _SEQUENCES, _LENGTH)

    def examples(self) -> list[Tensor]:
        x = self.draw(1)
        return [x, x[:1], x[:, :1]]

    def row_name(self, row: Sequence[int]) -> str:
        return f"position {row[1]} of sequence {row[0]}"

    def moved(self, part: Any, others: Any) -> tuple[str, float]:
        """Change a part of the input. Returns the row among `others` that changes most, and its relative change."""
        x = self.draw(1)
        changed = x.clone()
        changed[part] = 3 * random_like(x[part], 3)
        errors, kept = row_errors(self.run(changed)[0], self.run(x)[0]), torch.zeros_like(x[..., 0], dtype=torch.bool)
        kept[others] = True
        row, error = worst_row(errors.masked_fill(~kept, 0))
        return self.row_name(row), error

    def takes(self, name: str) -> bool:
        layer = self.module.layer
        method: Callable[..., Any] = getattr(layer, "segments", layer.forward)
        if self.kind == "block" and isinstance(parts := getattr(layer, "parts", None), Callable):
            method = parts
        context = accepted_context(layer, method, None, None)
        return name in context


def sequences_are_independent(layer: SequenceLayer) -> str:
    row, error = layer.moved(1, [0, *range(2, _SEQUENCES)])
    limit = layer.tolerance(layer.run(layer.draw(1))[0])
    if error > limit:
        raise Broken(
            f"the result of {row} changes by {error:.1e} (relative) if sequence 1 changes. A sequence must not depend "
            "on others in its batch: compute attention and statistics within each sequence"
        )
    return f"largest change of other sequences {error:.0e} of {limit:.0e}"


def is_causal(layer: SequenceLayer) -> str:
    """If all positions from some position on change, the results of the earlier positions stay the same."""
    limit, worst = layer.tolerance(layer.run(layer.draw(1))[0]), 0.0
    for start in range(1, _LENGTH):
        row, error = layer.moved((slice(None), slice(start, None)), (slice(None), slice(start)))
        if error > limit:
            raise Broken(
                f"the result of {row} changes by {error:.1e} (relative) if positions from {start} on change: it sees "
                "later tokens, which the model must predict. Mask them, for example with is_causal=True. A statistic "
                "over positions may include only earlier ones and the position itself"
            )
        worst = max(worst, error)
    return f"largest change of earlier positions {worst:.0e} of {limit:.0e}"


@torch.no_grad()
def cache_equals_all_at_once(layer: SequenceLayer) -> str:
    """Text generation: three positions, then one, then two, then one at a time."""
    x, module = layer.draw(1), layer.module
    y = layer.run(x)[0]
    takes, start = layer.takes("cache"), 0
    module.cache = KVCache()
    try:
        for number in (3, 1, 2, 1, 1):
            found = layer.run(x[:, start : start + number])[0]
            row, error = worst_row(row_errors(found, y[:, start : start + number]))
            if error > max(layer.tolerance(y), 1e-7):
                hint = (
                    "Append the new keys and values with cache.append(self.layer, ...), and let the new positions, "
                    "which start at cache.length, attend to all earlier ones"
                    if takes
                    else "Without a parameter `cache`, a position must not depend on the length of the sequence"
                )
                raise Broken(
                    f"in generation, position {start + row[1]} of sequence {row[0]} differs by {error:.1e} from the "
                    f"result for the whole sequence, with {plural(number, 'new position')} after {start}. {hint}"
                )
            start += number
            module.cache.length = start
    finally:
        module.cache = None
    return "with the layer's cache" if takes else "no parameter `cache`: the cache stores the inputs"


@torch.no_grad()
def mask_is_respected(layer: SequenceLayer) -> str:
    """With two documents in a sequence, the second does not depend on the first."""
    if not layer.takes("mask_B1SS"):
        raise Unchecked("no parameter mask_B1SS: --document-mask is an error with this layer")
    module, first = layer.module, 3
    y = layer.run(layer.draw(1))[0]
    documents_BS = (torch.arange(_LENGTH) >= first).int().expand(_SEQUENCES, _LENGTH).to(y.device)
    try:
        module.mask_B1SS = document_mask(torch.zeros_like(documents_BS))
        row, error = worst_row(row_errors(layer.run(layer.draw(1))[0], y))
        if error > max(layer.tolerance(y), 1e-7):
            raise Broken(
                f"with a mask of one document, {layer.row_name(row)} differs by {error:.1e} from the result without "
                "a mask. mask_B1SS is True where a position may attend to another; it is causal already"
            )
        module.mask_B1SS = document_mask(documents_BS)
        name, error = layer.moved((slice(None), slice(first)), (slice(None), slice(first, None)))
    finally:
        module.mask_B1SS = None
    if error > layer.tolerance(y):
        raise Broken(
            f"the result of {name}, in document 2, changes by {error:.1e} if document 1 changes: the mask mask_B1SS "
            "is not used"
        )
    return "two documents do not see each other"


def sequence_laws() -> list[Law]:
    sequences, causal = "sequences independent", "causal"
    own = [
        Law(sequences, sequences_are_independent),
        Law(causal, is_causal),
        Law("generation", cache_equals_all_at_once, [sequences, causal]),
        Law("document mask", mask_is_respected, [sequences, causal]),
    ]

    def overlapped(layer: SequenceLayer) -> str:
        return compare_overlapped(layer.module, layer.draw(5), layer.draw(6))

    return shared.laws("sequences in, sequences out", own, Law(shared.OVERLAPPED, overlapped, [shared.SPLIT]))
