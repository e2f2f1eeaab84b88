"""A layer under test: build it, call it, and get its results and gradients by name.

`Subject` has what all kinds of layers share. A subclass for each kind builds and calls the layer, and makes its inputs.

Layers are in fp64, where finite differences are exact to nine digits. Constant weights get some noise: zeros, as in a
LoRA matrix, would hide wrong gradients. Random numbers, such as those of dropout, are drawn with a fixed seed.

M rows in expert-major order, T tokens, K experts per token, B sequences, S positions, D model dim.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...expert_parallel import Local, Route
from ...expert_parallel.exchange import AsyncResult
from ...expert_parallel.parameters import expert_ids, global_tensors
from ...kernels.routing import expert_order
from ...messages import plural
from ...models import KVCache, ModelConfig, StageOptions
from ...models.attention import attention_class
from ...models.attention_layer import accepted_context, attend
from ...models.block import block_class, block_parts
from ...models.build_experts import ExpertBuilder
from ...models.layer_calls import call_layer, call_router
from ...models.layers import seed_of, seed_torch, seeded
from ...models.recompute import add_up
from ...models.router import build_router
from ...overlap import Compute, Segmented, Segments
from .first_difference import relative, row_errors
from .laws import Broken

M = TypeVar("M", bound=nn.Module)
Outputs = tuple[Tensor, ...]
Results = dict[str, Tensor | None]
"""The result of a layer, and the gradients of its input and weights, by their names in messages. None: no gradient."""

RESULT, INPUT = "the result", "the gradient of the input"
EQUAL, EQUAL_FP32 = 1e-9, 1e-3
"""The largest relative differences that rounding explains: of layers that compute in fp64, and in fp32 or less."""
_NOISE = 1e-9
DISTINCT = 3
"""Large inputs repeat this many rows. It is a prime, so that blocks of rows differ."""
SIZES = (0, 1, 63, 65, 127, 128, 129, 700)
"""Numbers of rows just below and above the block sizes of kernels. Their sum is above 1,000."""
_ALL = 7
"""Rows of an expert that gets all of them."""


@dataclass(frozen=True, slots=True)
class Case:
    """An input. Its rows are `x[index]`: large inputs repeat a few rows. Of attention and blocks, rows are sequences.

    counts: the number of rows of each expert, in order; other layers have one group of rows. cache, mask_B1SS:
    arguments of attention and blocks.
    """

    x: Tensor
    counts: tuple[int, ...]
    index: Tensor | None = None
    cache: KVCache | None = None
    mask_B1SS: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        return self.x if self.index is None else self.x[self.index]

    def to(self, dtype: torch.dtype) -> "Case":
        return replace(self, x=self.x.to(dtype))


class Subject(ABC):
    """A layer that `config` names. experts: the ids that an expert layer holds; None: all.

    row: what messages call a row: a row, a token or a sequence. rule: the message if the result of a row depends on
    other rows. place: a format of the position of a result, with its index `row`, or its `expert` and its index `i`
    among the rows of this expert. counts: the number of rows of each group in a typical input. length: the dimensions
    of an input between rows and model dim. shapes: other valid counts and lengths. prefix: the start of parameter
    names, which messages leave out.
    """

    kind: str
    rule: str
    place: str
    counts: Sequence[int]
    shapes: Sequence[tuple[Sequence[int], tuple[int, ...]]]
    row = "row"
    length: tuple[int, ...] = ()
    prefix = ""
    adds_losses = False
    """Whether the backward of a result also runs the backward of auxiliary losses."""

    def __init__(self, config: ModelConfig, device: str = "cpu", experts: range | None = None):
        self.config, self.device = config, device
        self.experts = range(config.num_experts) if experts is None else experts

    # ---- defined by each kind ----

    @abstractmethod
    def make(self, seed: int) -> nn.Module:
        """The layer, with initial weights drawn with this seed."""

    @abstractmethod
    def call(self, module: Any, case: Case) -> Outputs:
        """Call a module of this kind. Returns its result and then its decisions, such as expert ids, without gradients.

        Raises Broken for an invalid result.
        """

    def parts(self) -> Iterator[tuple[str, Any]]:
        """Parts of `draw(1)` to change: a name, and the index of this part. Only results of this part may change."""
        case = self.draw(1)
        for row in (0, len(case.x) // 2, len(case.x) - 1):
            yield self.row_name(case, [row]), row

    # ---- shared by all kinds ----

    def build(self, seed: int) -> nn.Module:
        with seeded(seed, self.kind):
            return prepare(self.make(seed), seed, self.device)

    def draw(self, seed: int) -> Case:
        """A random input. All seeds give the same shape; experts get other numbers of rows."""
        counts = self.counts
        first = (seed - 1) % len(counts)
        return Case(self.random(seed, sum(counts), *self.length), (*counts[first:], *counts[:first]))

    def sizes(self) -> Iterator[Case]:
        """Inputs of all shapes. Large ones repeat a few rows."""
        yield self.draw(1)
        for counts, length in self.shapes:
            index = torch.arange(sum(counts), device=self.device) % DISTINCT
            yield Case(self.random(4, DISTINCT, *length), tuple(counts), index)

    def row_name(self, case: Case, row: Sequence[int]) -> str:
        """Describe the index of a result. Example: counts [3, 2] and row [4] -> "row 1 of expert 1"."""
        groups = [(group, i) for group, count in enumerate(case.counts) for i in range(count)]
        group, i = groups[row[0]]
        return self.place.format(row=row, i=i, expert=self.experts.start + group)

    def describe(self, case: Case) -> str:
        """Such as "[3, 2, 5, 4] rows per expert in torch.bfloat16"."""
        rows = f"{[*case.counts]} rows per expert" if len(case.counts) > 1 else plural(sum(case.counts), self.row)
        length = f" of {plural(case.x.shape[1], 'position')}" if self.length else ""
        return f"{rows}{length}" + f" in {case.x.dtype}" * (case.x.dtype != torch.float64)

    def like(self, config: ModelConfig | None = None, experts: range | None = None) -> Any:
        """The same layer with another config, or with these experts."""
        return type(self)(config or self.config, self.device, experts)

    def alone(self, module: Any, case: Case) -> Outputs:
        """The same results, with one call for each row."""
        rows = range(len(case.x)) if case.index is None else case.index.tolist()
        groups = [group for group, count in enumerate(case.counts) for _ in range(count)]
        outputs = dict[tuple[int, int], Outputs]()
        for row, group in {*zip(rows, groups, strict=True)}:
            counts = tuple(int(group == other) for other in range(len(case.counts)))
            outputs[row, group] = self.call(module, Case(case.x[row : row + 1], counts))
        each = [outputs[key] for key in zip(rows, groups, strict=True)]
        return tuple(map(torch.cat, zip(*each, strict=True))) if each else self.call(module, case)

    @cached_property
    def module(self) -> Any:
        """The layer that all laws share: if a call leaves state in it, later results differ."""
        return self.build(0)

    @cached_property
    def exact(self) -> bool:
        """Whether the layer computes in fp64.

        f(x - h) - 2 f(x) + f(x + h) is almost 0 for a tiny step h. In fp32, rounding errors would remain.
        """
        x = self.draw(1)
        step = 1e-6 * self.random(9, *x.x.shape[:-1])
        low, middle, high = (
            self.outputs(replace(x, x=x.x + i * step), train=False)[0].double() for i in (-1.0, 0.0, 1.0)
        )
        return float((low - 2 * middle + high).norm()) <= _NOISE * float(middle.norm())

    @property
    def limit(self) -> float:
        return EQUAL if self.exact else EQUAL_FP32

    @cached_property
    def modes(self) -> tuple[bool, ...]:
        """Training and eval mode; eval mode only if training draws random numbers, which depend on the shape."""
        first, second = (self.outputs(self.draw(1), seed=seed)[0] for seed in (1, 2))
        return (True, False) if torch.equal(first, second) else (False,)

    def random(self, seed: int, *shape: int) -> Tensor:
        return random_like(torch.empty(*shape, self.config.hidden_size, dtype=torch.float64, device=self.device), seed)

    def run(self, module: Any, case: Case, train: bool, seed: int, forward: Callable[..., Outputs]) -> Outputs:
        """`forward(module, case)`, with a fixed seed of random numbers."""
        with torch.random.fork_rng(devices=[]):
            seed_torch(seed, torch.device(self.device))
            try:
                return forward(module.train(train), case)
            except Exception as error:
                error.add_note(f"with {self.describe(case)}")
                raise

    @torch.no_grad()
    def outputs(self, case: Case, train: bool = True, seed: int = 0) -> Outputs:
        """The outputs, without gradients."""
        return self.run(self.module, case, train, seed, self.call)

    def results(
        self, case: Case, train: bool = True, module: Any = None, v: Tensor | None = None,
        forward: Callable[..., Outputs] | None = None,
        backward: Callable[[Tensor, Tensor], None] = torch.autograd.backward,
    ) -> Results:  # fmt: skip
        """The result, its decisions, and the gradients of sum(v * result). v: None means a random direction.

        forward: `call` or `alone`. backward: called with the result and v. Gradients of auxiliary losses are measured
        in a second run, in which v is 0, and subtracted.
        """
        module, found = module or self.module, list[Results]()
        for factor in (1, 0) if self.adds_losses else (1,):
            module.zero_grad()
            leaf = replace(case, x=case.x.detach().requires_grad_())
            y, *decisions = self.run(module, leaf, train, 0, forward or self.call)
            if y.requires_grad:
                own = random_like(y, 5).bfloat16().to(y) if v is None else v  # in each dtype, the same numbers
                backward(y, own if factor else 0 * own)
            grads = {f"the gradient of {label}": grad for label, _, grad in self.weights(module)}
            found.append({INPUT: leaf.x.grad} | grads)
        module.zero_grad()
        first, of_losses = found[0], found[1:]
        for other in of_losses:
            first = {n: grad if grad is None or other[n] is None else grad - other[n] for n, grad in first.items()}  # type: ignore[operator]
        return {RESULT: y.detach(), **first} | {f"decision {i}": decision for i, decision in enumerate(decisions)}

    def weights(self, module: Any) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Each trained parameter, divided by expert: its name in messages, a view of it, and its gradient."""
        experts = expert_ids(module)
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            held = experts.get(name)
            grads = None if parameter.grad is None else global_tensors(name, parameter.grad.clone(), held)
            for i, (global_name, view) in enumerate(global_tensors(name, parameter.data, held)):
                label = global_name if held is not None and held.layout == "listed" else name
                if held is not None and held.layout == "stacked":
                    label = f"{name} of expert {held.ids[i]}"
                yield label.removeprefix(self.prefix), view, next(grads)[1] if grads is not None else None

    def compare(self, case: Case, found: Results, expected: Results, when: str, hint: str, limit: float = -1) -> int:
        """Raise Broken at the first difference. Returns the number of tensors. A gradient of None equals zeros.

        when: the end of the message, such as "if the input is transposed". hint: how to fix it. limit: the largest
        relative difference; -1: that of rounding.
        """
        limit = self.limit if limit < 0 else limit
        least = small_gradient(expected)
        for label in expected | found:
            got, wanted = found.get(label), expected.get(label)
            if (got is None or not got.any()) and (wanted is None or not wanted.any()):
                continue
            if got is None or wanted is None or got.shape != wanted.shape:
                what = "is missing" if got is None else "is new" if wanted is None else "has another shape"
                raise Broken(f"{label} {what} {when}. {hint}")
            name, size = label, ""
            error = relative(got, wanted, least) if wanted.is_floating_point() else float((got != wanted).any())
            if label == RESULT:
                row, error = worst_row(row_errors(got, wanted))
                name = self.row_name(case, row) if error else ""
            elif wanted.is_floating_point() and wanted.any():
                size = f" (about {float((got * wanted).sum() / wanted.square().sum()):.2g} times as large)"
            if error > limit:
                raise Broken(f"{name} differs by {error:.1e}{size} {when}. {hint}")
        return len(expected)


class Experts(Subject):
    """The expert layer that `config` names."""

    kind, place = "experts", "row {i} of expert {expert}"
    rule = (
        "The result of a row must depend only on this row and the weights of its expert: not on the position of the "
        "row, the number of rows, or statistics over rows, such as a mean or BatchNorm. An expert may have no rows, or "
        "all of them: row m belongs to expert e if expert_offsets[e] <= m < expert_offsets[e + 1]"
    )

    def __init__(self, config: ModelConfig, device: str = "cpu", experts: range | None = None):
        super().__init__(config, device, experts)
        number = config.num_experts
        self.counts = [2 + (3 * e + 1) % 4 for e in range(number)]  # uneven, and at least 2
        all_to_one = [[_ALL * (e == expert) for e in range(number)] for expert in sorted({0, number // 2, number - 1})]
        uneven = [[SIZES[(first + e) % len(SIZES)] for e in range(number)] for first in range(0, len(SIZES), number)]
        self.shapes = [(counts, ()) for counts in ([0] * number, *all_to_one, *uneven)]

    def make(self, seed: int) -> nn.Module:
        return ExpertBuilder(self.config, self.config.num_layers - 1, seed).build(self.experts)

    def call(self, module: Any, case: Case) -> Outputs:
        """If the layer takes an order, each row has one choice, with weight 1."""
        x, counts_E = case.rows, torch.tensor(case.counts, device=case.x.device)
        ids_M = torch.arange(len(counts_E), device=x.device).repeat_interleave(counts_E)
        order = expert_order(ids_M[:, None], len(counts_E), len(x))
        if getattr(module, "takes_order", False):
            weights_M1 = x.new_ones(len(x), 1, dtype=torch.promote_types(x.dtype, torch.float32))
            return (call_layer("experts", module, x, order, weights_M1),)
        return (call_layer("experts", module, x, order.expert_offsets),)


class Router(Subject):
    """The router that `config` names."""

    kind, row, place = "router", "token", "token {row[0]}"
    rule = (
        "If the choices of a token depend on other tokens of the batch, generation differs from training, because "
        "later tokens do not exist yet, and losses depend on the micro-batch size and the number of ranks"
    )
    adds_losses = True
    counts = (24,)
    shapes = tuple(((number,), ()) for number in (*SIZES[1:], sum(SIZES)))

    def make(self, seed: int) -> nn.Module:
        return build_router(self.config, 0)

    def call(self, module: Any, case: Case) -> Outputs:
        """Weights and ids. An even number of tokens is two sequences. Weights of id -1, which have no effect, are 0."""
        x_TD = case.rows
        x = x_TD if len(x_TD) % 2 else x_TD.unflatten(0, (2, -1))
        weights, ids = call_router(module, x, self.config.num_experts)[:2]
        if not getattr(module, "skips_choices", True) and (ids < 0).any():
            raise Broken(f"{int((ids < 0).sum())} ids are -1, but skips_choices is False: set skips_choices = True")
        return weights.masked_fill(ids < 0, 0.0), ids


class Attention(Subject):
    """The attention that `config` names."""

    kind, row, place = "attention", "sequence", "position {row[1]} of sequence {row[0]}"
    length, prefix = (8,), "layer."
    counts = (3,)
    shapes = tuple(
        ((number,), (length,))
        for number, length in ((1, 1), (65, 1), (1, 63), (2, 65), (1, 127), (3, 128), (1, 129), (9, 113))
    )
    rule = (
        "A result must not depend on other sequences of its batch, nor on later tokens, which the model must predict: "
        "compute statistics within each sequence, and mask later positions, for example with is_causal=True"
    )

    def make(self, seed: int) -> nn.Module:
        return _Runner(attention_class(self.config).build(self.config, layer=0))

    def call(self, module: Any, case: Case) -> Outputs:
        module.cache, module.mask_B1SS = case.cache, case.mask_B1SS
        return (module(case.rows),)

    def parts(self) -> Iterator[tuple[str, Any]]:
        yield "sequence 1", 1
        for start in range(1, *self.length):
            yield f"all from position {start} on", (slice(None), slice(start, None))

    def takes(self, name: str) -> bool:
        """Whether the layer has a parameter of this name."""
        layer = self.module.layer
        method: Callable[..., Any] = getattr(layer, "segments", layer.forward)
        if self.kind == "block" and isinstance(parts := getattr(layer, "parts", None), Callable):
            method = parts
        return name in accepted_context(layer, method, None, cache=None)


class Block(Attention):
    """The block that `config` names."""

    kind, adds_losses = "block", True

    def make(self, seed: int) -> nn.Module:
        experts = Interleaved(self.config.num_experts)
        return _Runner(block_class(self.config).build(self.config, 0, experts, StageOptions(seed=seed)), True)


class _Runner(Segmented):
    """Runs attention or a block as a model does, with its cache and document mask."""

    def __init__(self, layer: nn.Module, is_block: bool = False):
        super().__init__()
        self.layer, self.is_block = layer, is_block
        self.mask_B1SS: Tensor | None = None
        self.cache: KVCache | None = None

    def segments(self, x_BSD: Tensor) -> Segments:  # type: ignore[override]
        if not self.is_block:
            return (yield Compute("attn", lambda x: attend(self.layer, 0, x, self.cache, self.mask_B1SS), x_BSD))
        parts = yield from block_parts(self.layer, 0, (x_BSD,), self.cache, self.mask_B1SS)
        return (yield Compute("add", add_up, *parts))


class Interleaved(Local):
    """A single rank with asynchronous transfers, so that the engine interleaves as it does with several ranks."""

    def dispatch(self, x_TD: Tensor, route: Route, weights_TK: Tensor | None = None) -> Any:
        return AsyncResult([], super().dispatch(x_TD, route, weights_TK).wait)

    def combine(self, y_ND: Tensor, route: Route, weight_grads_NK: Tensor | None = None) -> Any:
        return AsyncResult([], super().combine(y_ND, route, weight_grads_NK).wait)


# ---- helpers ----


@torch.no_grad()
def prepare(module: M, seed: int = 0, device: str = "cpu") -> M:
    """The module in fp64, with noise added to constant weights. The noise does not depend on the number of ranks."""
    held = expert_ids(module)
    for name, parameter in module.named_parameters():
        ids = held.get(name)
        for global_name, view in global_tensors(name, parameter, ids):
            if view.numel() > 1 and bool((view == view.flatten()[0]).all()):
                seed_name = name if ids is not None and ids.layout == "shared" else global_name
                generator = torch.Generator().manual_seed(seed_of(seed, f"noise of {seed_name}"))
                view += 0.05 * torch.randn(view.shape, generator=generator).to(view)
    return module.to(device=device, dtype=torch.float64)


def without_dropout(module: nn.Module) -> None:
    """Turn dropout off: its random numbers depend on the layout."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            layer.p = 0.0


def random_like(x: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)


def small_gradient(results: Results) -> float:
    """Errors of gradients with a smaller norm are relative to this norm. Some gradients, as of a key bias, are 0."""
    grads = (t for label, t in results.items() if label.startswith("the gradient") and t is not None)
    return max((1e-3 * float(grad.double().norm()) for grad in grads), default=0.0) + 1e-4  # results are about 1


def worst_row(errors: Tensor) -> tuple[tuple[int, ...], float]:
    """The index of the largest error, and the error."""
    if not errors.numel():
        return (), 0.0
    return tuple(int(i) for i in torch.unravel_index(errors.argmax(), errors.shape)), float(errors.max())


def wider(subject: Subject, width: int = 256) -> Subject:
    """The same layer, but wider: its longer sums show errors that grow with the number of terms."""
    config = subject.config
    factor = max(1, width // config.hidden_size)
    sizes = {name: factor * getattr(config, name) for name in ("hidden_size", "expert_size", "dense_size")}
    return subject.like(replace(config, **sizes, init_std=config.init_std / factor**0.5))
