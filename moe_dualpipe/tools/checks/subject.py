"""A layer under test: how to build and call it, and everything that a call computes, by name.

The layer is in fp64, where finite differences are exact to nine digits. Constant weights get some noise, because zeros,
as in a LoRA matrix, would hide wrong gradients. Random numbers, such as those of dropout, are drawn with a fixed seed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...expert_parallel.parameters import expert_ids, global_tensors
from ...models.config import ModelConfig
from ...models.layers import seed_of
from .first_difference import relative, row_errors
from .laws import Broken

M = TypeVar("M", bound=nn.Module)
Outputs = tuple[Tensor, ...]
Results = dict[str, Tensor | None]
"""The result of a layer, and the gradients of its input and weights, by their names in messages. None: no gradient."""

RESULT, INPUT = "the result", "the gradient of the input"
EQUAL, EQUAL_FP32 = 1e-9, 1e-3
"""The largest relative difference that rounding explains, of layers that compute in fp64, and in fp32 or less."""
_NOISE = 1e-9
DISTINCT = 3
"""Rows of large inputs that differ, a prime, so that blocks differ, too."""


@dataclass(frozen=True, slots=True)
class Case:
    """An input. Its rows (of sequence layers: its sequences) are `x[index]`: large inputs repeat a few of them.

    counts: the rows of each expert, in order; in other layers, all rows are in one group.
    """

    x: Tensor
    counts: tuple[int, ...]
    index: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        return self.x if self.index is None else self.x[self.index]

    def to(self, dtype: torch.dtype) -> "Case":
        return replace(self, x=self.x.to(dtype))


class Subject(ABC):
    """A layer that `config` names, and how to use it. experts: those that an expert layer holds; None: all.

    row: what a result must not depend on others of. rule: says so, with the usual mistakes. prefix: the start of
    parameter names that messages leave out.
    """

    kind: str
    rule: str
    row = "row"
    prefix = ""
    adds_losses = False
    """Whether the backward of the result also runs that of auxiliary losses, which are not in the result."""

    def __init__(self, config: ModelConfig, device: str = "cpu", experts: range | None = None):
        self.config, self.device = config, device
        self.experts = range(config.num_experts) if experts is None else experts

    # ---- what differs between kinds of layers ----

    @abstractmethod
    def build(self, seed: int) -> nn.Module:
        """The layer with the initial weights of a seed."""

    @abstractmethod
    def call(self, module: Any, case: Case) -> Outputs:
        """Run a module of this kind. The first output carries gradients, the others are decisions, such as expert ids.

        Raises Broken for an invalid result.
        """

    @abstractmethod
    def draw(self, seed: int) -> Case:
        """An input, which differs between seeds. All have the same shape."""

    @abstractmethod
    def sizes(self) -> Iterator[Case]:
        """Inputs of all valid shapes."""

    @abstractmethod
    def row_name(self, case: Case, row: Sequence[int]) -> str:
        """The name of a row of the output, from its index."""

    @abstractmethod
    def describe(self, case: Case) -> str:
        """Such as "[3, 2, 5, 4] rows per expert"."""

    def parts(self) -> Iterator[tuple[str, Any]]:
        """Parts of `draw(1)` to change: a name, and an index of what may then change in the result."""
        case = self.draw(1)
        for row in (0, len(case.x) // 2, len(case.x) - 1):
            yield self.row_name(case, [row]), row

    # ---- what is the same ----

    def like(self, config: ModelConfig | None = None, experts: range | None = None) -> Any:
        """The same layer in other sizes, or with these experts."""
        return type(self)(config or self.config, self.device, experts)

    def repeated(self, x: Tensor, counts: Sequence[int]) -> Case:
        """Any number of rows, of which those of `x` differ."""
        return Case(x, tuple(counts), torch.arange(sum(counts), device=self.device) % len(x))

    def alone(self, module: Any, case: Case) -> Outputs:
        """The same results the plain way: each row (of a sequence layer: each sequence) in a call of its own."""
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
        """All laws use the same one, so that a call may change the results of later ones."""
        return self.build(0)

    @cached_property
    def averaged(self) -> frozenset[str]:
        """The names of the buffers that training may change, because it averages them over replicas."""
        layers = ((prefix and f"{prefix}.", layer) for prefix, layer in self.module.named_modules())
        return frozenset(prefix + name for prefix, layer in layers for name in getattr(layer, "averaged_buffers", ()))

    @cached_property
    def is_random(self) -> bool:
        """Whether calls in training draw random numbers, as for dropout."""
        first, second = (self.outputs(self.draw(1), seed=seed) for seed in (1, 2))
        return not torch.equal(first[0], second[0])

    @cached_property
    def exact(self) -> bool:
        """Whether the layer computes in fp64: its second difference over a small step has no rounding of fp32."""
        x = self.draw(1)
        step = 1e-6 * self.random(9, *x.x.shape[:-1])
        low, middle, high = (
            self.outputs(replace(x, x=x.x + i * step), train=False)[0].double() for i in (-1.0, 0.0, 1.0)
        )
        return float((low - 2 * middle + high).norm()) <= _NOISE * float(middle.norm())

    @property
    def limit(self) -> float:
        return EQUAL if self.exact else EQUAL_FP32

    @property
    def modes(self) -> tuple[bool, ...]:
        """Training mode or not, for inputs of other shapes: random numbers and statistics then differ in training."""
        return (False,) if self.averaged or self.is_random else (True, False)

    def random(self, seed: int, *shape: int) -> Tensor:
        return random_like(torch.empty(*shape, self.config.hidden_size, dtype=torch.float64, device=self.device), seed)

    def run(self, module: Any, case: Case, train: bool | None, seed: int, how: Callable[..., Outputs]) -> Outputs:
        """A call with a fixed seed. Averaged buffers have their values from before, if they may change."""
        train = not self.averaged if train is None else train
        kept = {name: t.clone() for name, t in module.state_dict().items() if train and name in self.averaged}
        with torch.random.fork_rng(devices=[]):
            (torch.default_generator.manual_seed if self.device == "cpu" else torch.manual_seed)(seed)
            try:
                outputs = how(module.train(train), case)
            except Exception as error:
                when = f"with {self.describe(case)}" + f" in {case.x.dtype}" * (case.x.dtype != torch.float64)
                if isinstance(error, Broken):
                    raise Broken(f"{when}, {error}") from None
                error.add_note(when)
                raise
        module.load_state_dict(kept, strict=False)
        return outputs

    @torch.no_grad()
    def outputs(self, case: Case, train: bool | None = None, seed: int = 0, module: Any = None) -> Outputs:
        """The outputs, without gradients. train: None means training mode, unless it averages buffers."""
        return self.run(module or self.module, case, train, seed, self.call)

    def results(
        self, case: Case, train: bool | None = None, module: Any = None, v: Tensor | None = None,
        how: Callable[..., Outputs] | None = None, backward: Callable[[Tensor, Tensor], None] = torch.autograd.backward,
    ) -> Results:  # fmt: skip
        """The result and all gradients of sum(v * result). v: None means a random direction.

        how: `call` or `alone`. backward: called with the result and v. Decisions are further results. Gradients of
        attached losses are subtracted: those of a second run, in which v is 0.
        """
        module, found = module or self.module, list[Results]()
        for factor in (1, 0) if self.adds_losses else (1,):
            module.zero_grad()
            leaf = replace(case, x=case.x.detach().requires_grad_())
            y, *decisions = self.run(module, leaf, train, 0, how or self.call)
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
        """Each trained parameter, or the part of each expert: its name in messages, a view of it, and its gradient."""
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
        """Raise Broken at the first difference, and return the number of compared tensors. None counts as zeros.

        when: in which case; hint: the way out. limit: the largest relative difference; -1 means rounding.
        """
        limit = self.limit if limit < 0 else limit
        least = small_gradient(expected)
        for label, wanted in expected.items():
            got = found.get(label)
            if (got is None or not got.any()) and (wanted is None or not wanted.any()):
                continue
            if got is None or wanted is None or got.shape != wanted.shape:
                raise Broken(f"{label} {'is missing' if got is None else 'has another shape'} {when}. {hint}")
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


@torch.no_grad()
def prepare(module: M, seed: int = 0, device: str = "cpu") -> M:
    """In fp64, with noise added to constant weights. The noise does not depend on the number of ranks."""
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
    """Turn dropout off: ranks and layouts draw other random numbers. Also that of the attention of transformers."""
    layers: list[Any] = [*module.modules()]
    for layer in layers:
        if hasattr(layer, "attention_dropout"):
            layer.attention_dropout = 0.0
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            layer.p = 0.0


def random_like(x: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)


def small_gradient(results: Results) -> float:
    """Errors of gradients below this norm are relative to it: of a bias of keys, for example, the exact one is 0."""
    grads = (t for label, t in results.items() if label.startswith("the gradient") and t is not None)
    return max((1e-3 * float(grad.double().norm()) for grad in grads), default=0.0) + 1e-4  # results are about 1


def worst_row(errors: Tensor) -> tuple[tuple[int, ...], float]:
    """The index of the largest error, and the error."""
    if not errors.numel():
        return (), 0.0
    index = int(errors.argmax())
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(index), errors.shape)), float(errors.flatten()[index])
