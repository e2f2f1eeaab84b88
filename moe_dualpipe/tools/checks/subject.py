"""A layer under test: how to build and call it, and how messages name its tensors.

The layer is in fp64, where finite differences are exact to nine digits. Dropout is off. Constant weights get some
noise, because zeros, as in a LoRA matrix, would hide wrong gradients.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ...expert_parallel.parameters import expert_ids, global_tensors
from ...models.config import ModelConfig
from ...models.layers import seed_of
from .laws import Broken, check_like_input

M = TypeVar("M", bound=nn.Module)
Outputs = tuple[Tensor, ...]
EQUAL = 1e-9
"""The largest relative difference that rounding in fp64 explains, where the order of additions may differ."""
EQUAL_FP32 = 1e-3
"""The same for layers that compute in fp32 or less although their input is in fp64."""


class Subject(ABC):
    """A layer that `config` names, and how to use it. prefix: the start of parameter names that messages leave out."""

    prefix = ""

    def __init__(self, config: ModelConfig, device: str = "cpu"):
        self.config, self.device = config, device

    @abstractmethod
    def build(self, seed: int) -> nn.Module:
        """The layer with the initial weights of a seed."""

    @abstractmethod
    def call(self, module: Any, x: Tensor) -> Outputs:
        """Run a module of this kind. The first output carries gradients. Raises Broken for an invalid result."""

    @abstractmethod
    def draw(self, seed: int) -> Tensor:
        """An input, which differs between seeds."""

    @abstractmethod
    def row_name(self, row: Sequence[int]) -> str:
        """The name of a row of the output, from its index."""

    def examples(self) -> list[Tensor]:
        """Inputs of all shapes that are valid."""
        return [self.draw(1)]

    @cached_property
    def module(self) -> Any:
        """All laws use the same one; the law "deterministic" may set it to eval mode."""
        return self.build(0)

    @cached_property
    def held(self) -> dict[str, Any]:
        return expert_ids(self.module)

    def random(self, seed: int, *shape: int) -> Tensor:
        return random_like(torch.empty(*shape, self.config.hidden_size, dtype=torch.float64, device=self.device), seed)

    @cached_property
    def averaged(self) -> frozenset[str]:
        """The names of the buffers that training may change, because it averages them over replicas."""
        layers = ((prefix and f"{prefix}.", layer) for prefix, layer in self.module.named_modules())
        return frozenset(prefix + name for prefix, layer in layers for name in getattr(layer, "averaged_buffers", ()))

    def run(self, x: Tensor) -> Outputs:
        """The outputs without gradients. In training mode, buffers that are averaged have their values from before."""
        averaged = self.averaged if self.module.training else ()
        before = {name: t.clone() for name, t in self.module.state_dict().items() if name in averaged}
        with torch.no_grad():
            outputs = self.call(self.module, x)
            self.module.load_state_dict(before, strict=False)
        return outputs

    def weights(self) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """Each trained parameter, or the part of each expert: its name in messages, a view of it, and its gradient."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                yield from self.parts(name, parameter.data, parameter.grad)

    def parts(self, name: str, tensor: Tensor, grad: Tensor | None) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        held = self.held.get(name)
        views = global_tensors(name, tensor, held)
        grads = global_tensors(name, grad, held) if grad is not None else None
        for i, (global_name, view) in enumerate(views):
            label = global_name if held is not None and held.layout == "listed" else name
            if held is not None and held.layout == "stacked":
                label = f"{name} of expert {held.ids[i]}"
            yield label.removeprefix(self.prefix), view, next(grads)[1] if grads is not None else None

    def backward(self, x: Tensor, seed: int = 0, factor: float | Tensor = 1.0) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run forward and backward from a random direction times `factor`.

        Returns the output, its gradient, and the gradient of the input.
        """
        self.module.zero_grad()
        x = x.clone().requires_grad_()
        y = self.call(self.module, x)[0]
        v = random_like(y, seed) * factor
        if y.requires_grad:
            y.backward(v)
        return y.detach(), v, x.grad

    def computes_in_fp64(self, y: Tensor) -> bool:
        return y.dtype == torch.float64 and not torch.equal(y, y.float().double())

    def tolerance(self, y: Tensor) -> float:
        return EQUAL if self.computes_in_fp64(y) else EQUAL_FP32


@torch.no_grad()
def prepare(module: M, seed: int = 0, dtype: torch.dtype = torch.float64, device: str = "cpu") -> M:
    """Turn dropout off, and add noise to constant weights. The noise does not depend on the number of ranks."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            layer.p = 0.0
    held = expert_ids(module)
    for name, parameter in module.named_parameters():
        ids = held.get(name)
        for global_name, view in global_tensors(name, parameter, ids):
            if view.numel() > 1 and bool((view == view.flatten()[0]).all()):
                seed_name = name if ids is not None and ids.layout == "shared" else global_name
                generator = torch.Generator().manual_seed(seed_of(seed, f"noise of {seed_name}"))
                view += 0.05 * torch.randn(view.shape, generator=generator).to(view)
    return module.to(device=device, dtype=dtype)


def random_like(x: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)


def check_like(x: Tensor, y: Any, subject: Subject) -> Outputs:
    """The outputs of a layer that returns a tensor like its input. Raises Broken for any other."""
    check_like_input("forward", x, y)
    if not (finite := y.isfinite().all(-1)).all():
        where = subject.row_name((~finite).nonzero()[0].tolist())
        raise Broken(f"the result has NaN or infinity at {where}, in {x.dtype}")
    return (y,)


def row_errors(found: Tensor, expected: Tensor) -> Tensor:
    """For each row, the difference relative to the norm of the row or, if that is smaller, of a typical row."""
    if not found.numel():
        return found.new_zeros(found.shape[:-1], dtype=torch.float64)
    x, y = found.double(), expected.double()
    norms = y.norm(dim=-1)
    typical = norms.square().mean().sqrt().clamp(min=1e-300)
    errors = (x - y).norm(dim=-1) / norms.clamp(min=float(typical))
    return torch.where(errors.isnan(), torch.inf, errors)


def relative(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|. Infinite if the shapes differ, or a difference is not finite."""
    if found.shape != expected.shape:
        return float("inf")
    if torch.equal(found, expected):
        return 0.0
    ratio = float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-300))
    return ratio if ratio == ratio else float("inf")


def worst_row(errors: Tensor) -> tuple[tuple[int, ...], float]:
    """The index of the largest error, and the error."""
    if not errors.numel():
        return (), 0.0
    index = int(errors.flatten().argmax())
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(index), errors.shape)), float(errors.flatten()[index])
