"""The four kinds of layers, each with its inputs and the plain way to compute its result.

M rows in expert-major order, E experts, T tokens, K experts per token, B sequences, S positions, D model dim.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.routing import expert_order
from ...messages import plural
from ...models.attention import attention_class
from ...models.attention_layer import accepted_context, attend
from ...models.block import block_class, block_parts
from ...models.build_experts import ExpertBuilder
from ...models.config import ModelConfig, StageOptions
from ...models.kv_cache import KVCache
from ...models.layers import seeded
from ...models.recompute import add_up
from ...models.router import build_router
from ...overlap import Compute, Segmented, Segments
from .laws import Broken
from .pairs import Interleaved
from .subject import SIZES, Case, Outputs, Subject, prepare

_DISTINCT, _ALL = 3, 7
"""Rows of large inputs that differ, a prime, so that blocks differ, too; and rows of an expert that gets all."""


def _like_input(case: Case, y: object, subject: Subject) -> Outputs:
    """The outputs of a layer that returns a tensor like its input. Raises Broken for any other."""
    x = case.rows
    expected = f"forward must return {[*x.shape]} in {x.dtype}, like its input"
    if not isinstance(y, Tensor):
        raise Broken(f"{expected}: got {type(y).__name__}")
    if y.shape != x.shape:
        raise Broken(f"{expected}: got {[*y.shape]}")
    if y.dtype != x.dtype:
        raise Broken(f"{expected}: got {y.dtype}. End forward with `y.to(x.dtype)`")
    if not (finite := y.isfinite().all(-1)).all():
        row = subject.row_name(case, (~finite).nonzero()[0].tolist())
        raise Broken(f"the result has NaN or infinity at {row}")
    return (y,)


class Experts(Subject):
    """The expert layer that `config` names, with the experts `local`; None: with all of them."""

    kind = "experts"
    rule = (
        "The result of a row must depend only on this row and the weights of its expert: not on the position of the "
        "row, the number of rows, or statistics over rows, such as a mean or BatchNorm. An expert may have no rows, or "
        "all of them: row m belongs to expert e if expert_offsets[e] <= m < expert_offsets[e + 1]"
    )

    def __init__(self, config: ModelConfig, device: str = "cpu", local: range | None = None):
        super().__init__(config, device)
        self.local = local

    @property
    def ids(self) -> range:
        return range(self.config.num_experts) if self.local is None else self.local

    def build(self, seed: int) -> nn.Module:
        layer = ExpertBuilder(self.config, self.config.num_layers - 1, seed).build(self.ids)
        return prepare(layer, seed, device=self.device)

    def ranks(self, ep: int) -> "list[Experts]":
        """The layers of all expert-parallel ranks."""
        size = self.config.num_experts // ep
        return [Experts(self.config, self.device, range(rank * size, (rank + 1) * size)) for rank in range(ep)]

    def draw(self, seed: int) -> Case:
        """An uneven number of rows of each expert, at least 2. All seeds have the same total."""
        counts = [2 + (3 * e + 1) % 4 for e in range(self.config.num_experts)]
        first = (seed - 1) % len(counts)
        counts = counts[first:] + counts[:first]
        return Case(self.random(seed, sum(counts)), counts=tuple(counts))

    def repeated(self, counts: Sequence[int]) -> Case:
        """Any number of rows of each expert, of which `_DISTINCT` differ."""
        index = torch.arange(sum(counts), device=self.device) % _DISTINCT
        return Case(self.random(4, _DISTINCT), index, tuple(counts))

    def sizes(self) -> Iterator[Case]:
        number = self.config.num_experts
        yield self.draw(1)
        yield self.repeated([0] * number)
        for expert in sorted({0, number // 2, number - 1}):
            yield self.repeated([_ALL * (e == expert) for e in range(number)])
        for first in range(0, len(SIZES), number):
            yield self.repeated([SIZES[(first + e) % len(SIZES)] for e in range(number)])

    def row_name(self, case: Case, row: Sequence[int]) -> str:
        """Example: counts [3, 2] and row 4 -> "row 1 of expert 1"."""
        left = row[0]
        for expert, count in zip(self.ids, case.counts, strict=True):
            if left < count:
                return f"row {left} of expert {expert}"
            left -= count
        raise IndexError(row)

    def describe(self, case: Case) -> str:
        return f"{[*case.counts]} rows per expert"

    def call(self, module: Any, case: Case) -> Outputs:
        """A layer that takes an order gets one choice of weight 1 per row."""
        x, counts_E = case.rows, torch.tensor(case.counts, device=case.x.device)
        if getattr(module, "takes_order", False):
            ids_M = torch.arange(len(counts_E), device=x.device).repeat_interleave(counts_E)
            order = expert_order(ids_M[:, None], len(counts_E), len(x))
            y_MD = module(x, order, x.new_ones(len(x), 1, dtype=torch.promote_types(x.dtype, torch.float32)))
        else:
            y_MD = module(x, nn.functional.pad(counts_E.cumsum(0), (1, 0)).to(torch.int32))
        return _like_input(case, y_MD, self)

    def alone(self, module: Any, case: Case) -> Outputs:
        index = range(len(case.x)) if case.index is None else case.index.tolist()
        experts = [e for e, count in enumerate(case.counts) for _ in range(count)]
        rows = dict[tuple[int, int], Tensor]()
        for e, i in {*zip(experts, index, strict=True)}:
            one = Case(case.x[i : i + 1], counts=tuple(int(e == other) for other in range(len(case.counts))))
            rows[e, i] = self.call(module, one)[0]
        return (torch.cat([case.x[:0], *(rows[key] for key in zip(experts, index, strict=True))]),)

    def parts(self) -> Iterator[tuple[str, Any, Any]]:
        case = self.draw(1)
        for row in (0, len(case.x) // 2, len(case.x) - 1):
            yield self.row_name(case, [row]), row, row


class Router(Subject):
    """The router that `config` names."""

    kind, row = "router", "token"
    rule = (
        "If the choices of a token depend on other tokens of the batch, generation differs from training, because "
        "later tokens do not exist yet, and losses depend on the micro-batch size and the number of ranks"
    )
    adds_losses = True

    def build(self, seed: int) -> nn.Module:
        with seeded(seed, "router"):
            return prepare(build_router(self.config, 0), seed, device=self.device)

    def draw(self, seed: int) -> Case:
        return Case(self.random(seed, 4, 6))

    def sizes(self) -> Iterator[Case]:
        x_BSD = self.draw(1).x
        yield from map(Case, (x_BSD, x_BSD[0], x_BSD[:1, :1]))
        for number in (*SIZES[1:], sum(SIZES)):
            yield Case(x_BSD.flatten(0, 1)[:_DISTINCT], torch.arange(number, device=x_BSD.device) % _DISTINCT)

    def row_name(self, case: Case, row: Sequence[int]) -> str:
        return f"token {row[0]}"

    def describe(self, case: Case) -> str:
        return f"{plural(case.rows[..., 0].numel(), 'token')} of shape {[*case.rows.shape]}"

    def call(self, module: Any, case: Case) -> Outputs:
        """Weights, ids, and the values of losses. Weights of id -1 become 0: they have no effect in a model."""
        weights, ids, *losses = self._checked(module(case.rows), case.rows, module)
        return weights.masked_fill(ids < 0, 0.0), ids, *losses

    def alone(self, module: Any, case: Case) -> Outputs:
        """Each token in a batch of its own."""
        rows = [self.call(module, Case(row[None, None]))[:2] for row in case.x.flatten(0, -2)]
        weights, ids = (torch.cat(part) for part in zip(*rows, strict=True))
        return (weights, ids) if case.index is None else (weights[case.index], ids[case.index])

    def _checked(self, outputs: Any, x: Tensor, module: Any) -> Outputs:
        """Raises Broken if shapes, dtypes or ids are wrong, or a weight is not finite."""
        if not isinstance(outputs, tuple | list) or len(outputs) < 2:
            got = f"{len(outputs)} values" if isinstance(outputs, tuple | list) else type(outputs).__name__
            raise Broken(f"forward must return weights_TK and ids_TK: got {got}")
        weights, ids, tokens, experts = outputs[0], outputs[1], x[..., 0].numel(), self.config.num_experts
        if weights.ndim != 2 or weights.shape != ids.shape or len(weights) != tokens:
            raise Broken(
                f"weights and ids must both be [{tokens}, K]: got {[*weights.shape]} and {[*ids.shape]}. Flatten x to "
                "tokens with `x.flatten(0, -2)`"
            )
        if ids.dtype != torch.int64:
            raise Broken(f"ids must be int64: got {ids.dtype}. Convert them with `ids.long()`")
        if weights.dtype not in (torch.float32, torch.float64):
            raise Broken(f"weights must be in fp32 or fp64: got {weights.dtype}. Compute them from `logits.float()`")
        if (bad := ~weights.isfinite()).any():
            token = int(bad.any(1).nonzero()[0])
            raise Broken(
                f"a weight of token {token} is not finite: {weights[token].tolist()}. The weight of id -1 must be "
                "finite, too: its gradient is 0, and 0 times infinity is NaN in backward"
            )
        sorted_TK = ids.sort().values
        if (bad := (ids < -1) | (ids >= experts)).any():
            token = int(bad.any(1).nonzero()[0])
            rule = f"ids are global, from 0 to {experts - 1}, or -1 for no expert"
            raise Broken(f"token {token} chooses experts {ids[token].tolist()}: {rule}")
        if (bad := (sorted_TK[:, 1:] == sorted_TK[:, :-1]) & (sorted_TK[:, 1:] >= 0)).any():
            token = int(bad.any(1).nonzero()[0])
            rule = "add up its weights, and use id -1 for the duplicates"
            raise Broken(f"token {token} chooses an expert more than once: {ids[token].tolist()}: {rule}")
        if not getattr(module, "skips_choices", True) and (ids < 0).any():
            raise Broken(f"{int((ids < 0).sum())} ids are -1, but skips_choices is False: set skips_choices = True")
        return tuple(outputs)

    def parts(self) -> Iterator[tuple[str, Any, Any]]:
        for b, s in ((0, 0), (1, 3), (3, 5)):
            yield f"token {6 * b + s}", (b, s), 6 * b + s


class _Runner(Segmented):
    """Runs a layer as a model does, with its cache and document mask."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer
        self.mask_B1SS: Tensor | None = None
        self.cache: KVCache | None = None


class _AttentionRunner(_Runner):
    def segments(self, x_BSD: Tensor) -> Segments:  # type: ignore[override]
        return (yield Compute("attn", lambda x: attend(self.layer, 0, x, self.cache, self.mask_B1SS), x_BSD))


class _BlockRunner(_Runner):
    def segments(self, x_BSD: Tensor) -> Segments:  # type: ignore[override]
        parts = yield from block_parts(self.layer, 0, (x_BSD,), self.cache, self.mask_B1SS)
        return (yield Compute("add", add_up, *parts))


class Attention(Subject):
    """The attention that `config` names."""

    kind, row, prefix = "attention", "sequence", "layer."
    rule = (
        "A result must not depend on other sequences of its batch, nor on later tokens, which the model must predict: "
        "compute statistics within each sequence, and mask later positions, for example with is_causal=True"
    )

    def build(self, seed: int) -> nn.Module:
        with seeded(seed, self.kind):
            return prepare(self.runner(seed), seed, device=self.device)

    def runner(self, seed: int) -> nn.Module:
        return _AttentionRunner(attention_class(self.config).build(self.config, layer=0))

    def call(self, module: Any, case: Case) -> Outputs:
        return _like_input(case, module(case.rows), self)

    def alone(self, module: Any, case: Case) -> Outputs:
        y_BSD = torch.cat([self.call(module, Case(x_SD[None]))[0] for x_SD in case.x])
        return (y_BSD if case.index is None else y_BSD[case.index],)

    def draw(self, seed: int) -> Case:
        return Case(self.random(seed, 3, 8))

    def sizes(self) -> Iterator[Case]:
        yield self.draw(1)
        for number, length in ((1, 1), (65, 1), (1, 63), (2, 65), (1, 127), (3, 128), (1, 129), (9, 113)):
            index = torch.arange(number, device=self.device) % 3
            yield Case(self.random(4, min(number, 3), length), index)

    def row_name(self, case: Case, row: Sequence[int]) -> str:
        return f"position {row[1]} of sequence {row[0]}"

    def describe(self, case: Case) -> str:
        return f"{plural(len(case.rows), 'sequence')} of {plural(case.rows.shape[1], 'position')}"

    def parts(self) -> Iterator[tuple[str, Any, Any]]:
        yield "sequence 1", 1, 1
        for start in range(1, self.draw(1).x.shape[1]):
            later = (slice(None), slice(start, None))
            yield f"all from position {start} on", later, later

    def takes(self, name: str) -> bool:
        """Whether the layer has a parameter of this name."""
        layer = self.module.layer
        method: Callable[..., Any] = getattr(layer, "segments", layer.forward)
        if self.kind == "block" and isinstance(parts := getattr(layer, "parts", None), Callable):
            method = parts
        return name in accepted_context(layer, method, None, None)


class Block(Attention):
    """The block that `config` names."""

    kind, adds_losses = "block", True

    def runner(self, seed: int) -> nn.Module:
        experts = Interleaved(self.config.num_experts)
        return _BlockRunner(block_class(self.config).build(self.config, 0, experts, StageOptions(seed=seed)))


def wider(subject: Subject, width: int = 256) -> Subject:
    """The same layer with longer sums: errors of fp32 and bf16 that grow with their length show."""
    config = subject.config
    factor = max(1, width // config.hidden_size)
    sizes = {name: factor * getattr(config, name) for name in ("hidden_size", "expert_size", "dense_size")}
    return subject.like(replace(config, **sizes, init_std=config.init_std / factor**0.5))
