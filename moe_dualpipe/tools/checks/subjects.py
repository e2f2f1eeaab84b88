"""The four kinds of layers, each with its inputs and what a call returns.

M rows in expert-major order, E experts, T tokens, K experts per token, B sequences, S positions, D model dim.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...expert_parallel import Local, Route
from ...expert_parallel.exchange import AsyncResult
from ...kernels.routing import expert_order
from ...messages import plural
from ...models.attention import attention_class
from ...models.attention_layer import accepted_context, attend
from ...models.block import block_class, block_parts
from ...models.build_experts import ExpertBuilder
from ...models.config import StageOptions
from ...models.kv_cache import KVCache
from ...models.layers import seeded
from ...models.recompute import add_up
from ...models.router import build_router
from ...overlap import Compute, Segmented, Segments
from .laws import Broken
from .subject import DISTINCT, Case, Outputs, Subject, prepare

SIZES = (0, 1, 63, 65, 127, 128, 129, 700)
"""Numbers of rows on both sides of the sizes of blocks. Their sum is above 1,000."""
_ALL = 7
"""Rows of an expert that gets all."""


class Experts(Subject):
    """The expert layer that `config` names."""

    kind = "experts"
    rule = (
        "The result of a row must depend only on this row and the weights of its expert: not on the position of the "
        "row, the number of rows, or statistics over rows, such as a mean or BatchNorm. An expert may have no rows, or "
        "all of them: row m belongs to expert e if expert_offsets[e] <= m < expert_offsets[e + 1]"
    )

    def build(self, seed: int) -> nn.Module:
        layer = ExpertBuilder(self.config, self.config.num_layers - 1, seed).build(self.experts)
        return prepare(layer, seed, self.device)

    def draw(self, seed: int) -> Case:
        """An uneven number of rows of each expert, at least 2. All seeds have the same total."""
        counts = [2 + (3 * e + 1) % 4 for e in range(self.config.num_experts)]
        first = (seed - 1) % len(counts)
        return Case(self.random(seed, sum(counts)), (*counts[first:], *counts[:first]))

    def sizes(self) -> Iterator[Case]:
        number, x_MD = self.config.num_experts, self.random(4, DISTINCT)
        yield self.draw(1)
        yield self.repeated(x_MD, [0] * number)
        for expert in sorted({0, number // 2, number - 1}):
            yield self.repeated(x_MD, [_ALL * (e == expert) for e in range(number)])
        for first in range(0, len(SIZES), number):
            yield self.repeated(x_MD, [SIZES[(first + e) % len(SIZES)] for e in range(number)])

    def row_name(self, case: Case, row: Sequence[int]) -> str:
        """Example: counts [3, 2] and row 4 -> "row 1 of expert 1"."""
        groups = [(expert, i) for expert, count in zip(self.experts, case.counts, strict=True) for i in range(count)]
        return "row {1} of expert {0}".format(*groups[row[0]])

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
            return prepare(build_router(self.config, 0), seed, self.device)

    def draw(self, seed: int) -> Case:
        return Case(self.random(seed, 24), (24,))

    def sizes(self) -> Iterator[Case]:
        yield self.draw(1)
        for number in (*SIZES[1:], sum(SIZES)):
            yield self.repeated(self.random(4, DISTINCT), [number])

    def row_name(self, case: Case, row: Sequence[int]) -> str:
        return f"token {row[0]}"

    def describe(self, case: Case) -> str:
        return plural(sum(case.counts), "token")

    def call(self, module: Any, case: Case) -> Outputs:
        """Weights and ids. Weights of id -1 become 0: they have no effect in a model. Even numbers: two sequences."""
        x_TD = case.rows
        x = x_TD if len(x_TD) % 2 else x_TD.unflatten(0, (2, -1))
        weights, ids = _checked_choices(module(x), len(x_TD), self.config.num_experts)
        if not getattr(module, "skips_choices", True) and (ids < 0).any():
            raise Broken(f"{int((ids < 0).sum())} ids are -1, but skips_choices is False: set skips_choices = True")
        return weights.masked_fill(ids < 0, 0.0), ids


class Attention(Subject):
    """The attention that `config` names."""

    kind, row, prefix = "attention", "sequence", "layer."
    rule = (
        "A result must not depend on other sequences of its batch, nor on later tokens, which the model must predict: "
        "compute statistics within each sequence, and mask later positions, for example with is_causal=True"
    )

    def build(self, seed: int) -> nn.Module:
        with seeded(seed, self.kind):
            return prepare(self.runner(seed), seed, self.device)

    def runner(self, seed: int) -> nn.Module:
        return _AttentionRunner(attention_class(self.config).build(self.config, layer=0))

    def call(self, module: Any, case: Case) -> Outputs:
        return _like_input(case, module(case.rows), self)

    def draw(self, seed: int) -> Case:
        return Case(self.random(seed, 3, 8), (3,))

    def sizes(self) -> Iterator[Case]:
        yield self.draw(1)
        for number, length in ((1, 1), (65, 1), (1, 63), (2, 65), (1, 127), (3, 128), (1, 129), (9, 113)):
            yield self.repeated(self.random(4, min(number, DISTINCT), length), [number])

    def row_name(self, case: Case, row: Sequence[int]) -> str:
        return f"position {row[1]} of sequence {row[0]}"

    def describe(self, case: Case) -> str:
        return f"{plural(sum(case.counts), 'sequence')} of {plural(case.x.shape[1], 'position')}"

    def parts(self) -> Iterator[tuple[str, Any]]:
        yield "sequence 1", 1
        for start in range(1, self.draw(1).x.shape[1]):
            yield f"all from position {start} on", (slice(None), slice(start, None))

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


class Interleaved(Local):
    """A single rank whose transfers are not complete immediately, so the engine interleaves as with several ranks."""

    def dispatch(self, x_TD: Tensor, route: Route, weights_TK: Tensor | None = None) -> Any:
        return AsyncResult([], super().dispatch(x_TD, route, weights_TK).wait)

    def combine(self, y_ND: Tensor, route: Route, weight_grads_NK: Tensor | None = None) -> Any:
        return AsyncResult([], super().combine(y_ND, route, weight_grads_NK).wait)


def _like_input(case: Case, y: object, subject: Subject) -> Outputs:
    """The outputs of a layer that returns a tensor like its input. Raises Broken for any other."""
    x = case.rows
    wrong = None
    if not isinstance(y, Tensor):
        wrong = type(y).__name__
    elif y.shape != x.shape:
        wrong = f"{[*y.shape]}"
    elif y.dtype != x.dtype:
        wrong = f"{y.dtype}. End forward with `y.to(x.dtype)`"
    if wrong is not None or not isinstance(y, Tensor):
        raise Broken(f"forward must return {[*x.shape]} in {x.dtype}, like its input: got {wrong}")
    if not (finite := y.isfinite().all(-1)).all():
        row = subject.row_name(case, (~finite).nonzero()[0].tolist())
        raise Broken(f"the result has NaN or infinity at {row}")
    return (y,)


def _checked_choices(outputs: Any, tokens: int, experts: int) -> Outputs:
    """Weights and ids. Raises Broken if shapes, dtypes or ids are wrong, or a weight is not finite."""
    if not isinstance(outputs, tuple | list) or len(outputs) < 2:
        got = f"{len(outputs)} values" if isinstance(outputs, tuple | list) else type(outputs).__name__
        raise Broken(f"forward must return weights_TK and ids_TK: got {got}")
    weights, ids = outputs[:2]
    if weights.ndim != 2 or weights.shape != ids.shape or len(weights) != tokens:
        raise Broken(
            f"weights and ids must both be [{tokens}, K]: got {[*weights.shape]} and {[*ids.shape]}. Flatten x to "
            "tokens with `x.flatten(0, -2)`"
        )
    if ids.dtype != torch.int64:
        raise Broken(f"ids must be int64: got {ids.dtype}. Convert them with `ids.long()`")
    if weights.dtype not in (torch.float32, torch.float64):
        raise Broken(f"weights must be in fp32 or fp64: got {weights.dtype}. Compute them from `logits.float()`")
    sorted_TK = ids.sort().values
    twice = (sorted_TK[:, 1:] == sorted_TK[:, :-1]) & (sorted_TK[:, 1:] >= 0)
    faults = (
        (~weights.isfinite(), weights, "has a weight that is not finite: also the weight of id -1 must be finite, "
         "because its gradient is 0, and 0 times infinity is NaN in backward"),
        ((ids < -1) | (ids >= experts), ids,
         f"has a wrong id: ids are global, from 0 to {experts - 1}, or -1 for no expert"),
        (twice, ids, "chooses an expert more than once: add up its weights, and use id -1 for the duplicates"),
    )  # fmt: skip
    for bad, values, rule in faults:
        if bad.any():
            token = int(bad.any(1).nonzero()[0])
            raise Broken(f"token {token}, with {values[token].tolist()}, {rule}")
    return weights, ids


def wider(subject: Subject, width: int = 256) -> Subject:
    """The same layer with longer sums: errors of fp32 and bf16 that grow with their length show."""
    config = subject.config
    factor = max(1, width // config.hidden_size)
    sizes = {name: factor * getattr(config, name) for name in ("hidden_size", "expert_size", "dense_size")}
    return subject.like(replace(config, **sizes, init_std=config.init_std / factor**0.5))
