"""The laws of layers that map sequences to sequences: attention (`AttentionLayer`) and blocks (`BlockLayer`).

B sequences, S positions, D model dim.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
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
from .laws import Broken, Law, Unchecked, check_like_input
from .pairs import Interleaved, compare_overlapped
from .subject import Subject, prepare, random_like, row_errors, worst_row

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


@dataclass
class SequenceLayer:
    """The attention or the block that `config` names."""

    kind: str
    config: ModelConfig
    device: str = "cpu"

    @cached_property
    def module(self) -> Any:
        return self.build(0)

    def build(self, seed: int) -> nn.Module:
        with seeded(seed, self.kind):
            if self.kind == "attention":
                runner = AttentionRunner(attention_class(self.config).build(self.config, layer=0))
            else:
                experts, options = Interleaved(self.config.num_experts), StageOptions(seed=seed)
                runner = BlockRunner(block_class(self.config).build(self.config, 0, experts, options))
        return prepare(runner, seed, device=self.device)

    def whole(self) -> Subject:
        return Subject(
            self.module, lambda module, x: (call(module, x),), self.sequences, self.build,
            lambda row: f"position {row[1]} of sequence {row[0]}", "layer.",
        )  # fmt: skip

    def sequences(self, seed: int) -> Tensor:
        shape = _SEQUENCES, _LENGTH, self.config.hidden_size
        return random_like(torch.empty(shape, dtype=torch.float64, device=self.device), seed)

    def takes(self, name: str) -> bool:
        layer = self.module.layer
        method: Callable[..., Any] = getattr(layer, "segments", layer.forward)
        if self.kind == "block" and isinstance(parts := getattr(layer, "parts", None), Callable):
            method = parts
        context = accepted_context(layer, method, None, None)
        return name in context


def call(module: nn.Module, x_BSD: Tensor) -> Tensor:
    """Raises Broken if the layer does not return a tensor of the same shape and dtype."""
    y_BSD = module(x_BSD)
    check_like_input("the layer", x_BSD, y_BSD)
    return y_BSD


def is_built(layer: SequenceLayer) -> str:
    return plural(sum(parameter.numel() for parameter in layer.module.parameters()), "parameter")


def returns_sequences(layer: SequenceLayer) -> str:
    x = layer.sequences(1)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        module = copy.deepcopy(layer.module).to(dtype)
        for part in (x, x[:1], x[:, :1]):
            with torch.no_grad():
                y = call(module, part.to(dtype))
            if not (finite := y.isfinite().all(-1)).all():
                sequence, position = (~finite).nonzero()[0].tolist()
                where = f"position {position} of sequence {sequence}"
                raise Broken(f"the result has NaN or infinity at {where}, in {dtype}")
    return f"{[*x.shape]}, one sequence, one position, in fp64, fp32, bf16"


def sequences_are_independent(layer: SequenceLayer) -> str:
    subject, x = layer.whole(), layer.sequences(1)
    y, changed = subject.run(x)[0], x.clone()
    changed[1] = 3 * random_like(x[1], 3)
    errors = row_errors(subject.run(changed)[0], y)
    errors[1] = 0
    row, error = worst_row(errors)
    if error > subject.tolerance(y):
        raise Broken(
            f"the result of {subject.row_name(row)} changes by {error:.1e} (relative) if sequence 1 changes. A "
            "sequence must not depend on others in its batch: compute attention and statistics within each sequence"
        )
    return f"largest change of other sequences {error:.0e} of {subject.tolerance(y):.0e}"


def is_causal(layer: SequenceLayer) -> str:
    """If all positions from some position on change, the results of the earlier positions stay the same."""
    subject, x = layer.whole(), layer.sequences(1)
    y, worst = subject.run(x)[0], 0.0
    for start in range(1, _LENGTH):
        changed = x.clone()
        changed[:, start:] = 3 * random_like(x[:, start:], 3)
        row, error = worst_row(row_errors(subject.run(changed)[0], y)[:, :start])
        if error > subject.tolerance(y):
            raise Broken(
                f"the result of {subject.row_name(row)} changes by {error:.1e} (relative) if positions from {start} "
                "on change: it sees later tokens, which the model must predict. Mask them, for example with "
                "is_causal=True. A statistic over positions may include only earlier ones and the position itself"
            )
        worst = max(worst, error)
    return f"largest change of earlier positions {worst:.0e} of {subject.tolerance(y):.0e}"


@torch.no_grad()
def cache_equals_all_at_once(layer: SequenceLayer) -> str:
    """Text generation: three positions, then one, then two, then one at a time."""
    subject, x = layer.whole(), layer.sequences(1)
    y, module = subject.run(x)[0], layer.module
    takes, start = layer.takes("cache"), 0
    module.cache = KVCache()
    try:
        for number in (3, 1, 2, 1, 1):
            found = call(module, x[:, start : start + number])
            row, error = worst_row(row_errors(found, y[:, start : start + number]))
            if error > max(subject.tolerance(y), 1e-7):
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
    subject, x, module = layer.whole(), layer.sequences(1), layer.module
    y, first = subject.run(x)[0], 3
    documents_BS = (torch.arange(_LENGTH) >= first).int().expand(_SEQUENCES, _LENGTH).to(x.device)
    changed = x.clone()
    changed[:, :first] = 3 * random_like(x[:, :first], 3)
    try:
        module.mask_B1SS = document_mask(torch.zeros_like(documents_BS))
        row, error = worst_row(row_errors(call(module, x), y))
        if error > max(subject.tolerance(y), 1e-7):
            raise Broken(
                f"with a mask of one document, {subject.row_name(row)} differs by {error:.1e} from the result without "
                "a mask. mask_B1SS is True where a position may attend to another; it is causal already"
            )
        module.mask_B1SS = document_mask(documents_BS)
        errors = row_errors(call(module, changed), call(module, x))
    finally:
        module.mask_B1SS = None
    errors[:, :first] = 0
    row, error = worst_row(errors)
    if error > subject.tolerance(y):
        raise Broken(
            f"the result of {subject.row_name(row)}, in document 2, changes by {error:.1e} if document 1 changes: "
            "the mask mask_B1SS is not used"
        )
    return "two documents do not see each other"


def needs_processes(layer: SequenceLayer) -> str:
    raise Unchecked(f"this needs several processes: `moe-dualpipe check parallel --block {layer.config.block}`")


PARAMETERS = "parameters get gradients"
BUILT, SHAPES = "constructor", "sequences in, sequences out"
INPUT, SAME, STATE = "input not written", "deterministic", "no state"
SEQUENCES, CAUSAL, SPLIT = "sequences independent", "causal", "split backward"


def sequence_laws(kind: str) -> list[Law]:
    call_ = [BUILT, SHAPES]
    repeatable = [*call_, INPUT, SAME, STATE]
    laws = [
        Law(BUILT, is_built),
        Law(SHAPES, returns_sequences, [BUILT]),
        Law(INPUT, lambda s: shared.input_is_not_written(s.whole()), call_),
        Law(SAME, lambda s: shared.is_deterministic(s.whole()), [*call_, INPUT]),
        Law(STATE, lambda s: shared.has_no_state(s.whole()), [*call_, SAME]),
        Law(SEQUENCES, sequences_are_independent, repeatable),
        Law(CAUSAL, is_causal, repeatable),
        Law("generation", cache_equals_all_at_once, [*repeatable, SEQUENCES, CAUSAL]),
        Law("document mask", mask_is_respected, [*repeatable, SEQUENCES, CAUSAL]),
        Law("saved and loaded", lambda s: shared.checkpoint_is_complete(s.whole()), repeatable),
        Law(PARAMETERS, lambda s: shared.parameters_get_gradients(s.whole()), repeatable),
        Law("gradients", lambda s: shared.gradients_are_right(s.whole()), [*repeatable, PARAMETERS]),
        Law(SPLIT, lambda s: shared.split_equals_whole(s.whole()), repeatable),
        Law(
            "overlapped equals sequential",
            lambda s: compare_overlapped(s.module, s.sequences(5), s.sequences(6)),
            [*repeatable, SPLIT],
        ),
        Law("no host sync", lambda s: shared.needs_no_host_sync(s.whole(), s.device), repeatable),
    ]
    return laws if kind == "attention" else [*laws, Law("ep=2 equals ep=1", needs_processes)]
