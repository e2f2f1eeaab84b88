"""The expert MLP as each library implements it, called through the library's public functions.

    y[n] = sum over k of weights[n, k] * down_e(silu(gate_e x[n]) * up_e x[n])       with e = ids[n, k]

Each implementation goes from tokens, expert ids and routing weights to the output, so sorting by expert is timed too.
Weights are converted to a library's layout once, before timing; gradients are converted back for the comparison.
Building an implementation raises ImportError if its library is not installed.

N tokens, D model dim, F expert hidden size, E experts, K experts per token.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .shapes import Shape


@dataclass(frozen=True, slots=True)
class Problem:
    """The inputs of one layer and the gradient of its output. All values, fp32 weights too, are exact in `x.dtype`."""

    shape: Shape
    x_ND: Tensor
    gate_up: Tensor  # [E, 2F, D]
    down: Tensor  # [E, D, F]
    ids_NK: Tensor
    weights_NK: Tensor
    dy_ND: Tensor

    @classmethod
    def random(cls, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> "Problem":
        """Draw inputs such that activations have unit variance; each token draws K distinct experts uniformly."""
        generator = torch.Generator(device).manual_seed(seed)
        draw = partial(torch.randn, generator=generator, device=device)
        scores_NE = draw(shape.T, shape.E)
        top_NK, ids_NK = scores_NE.topk(shape.K, dim=1)
        return cls(
            shape=shape,
            x_ND=draw(shape.T, shape.D, dtype=dtype),
            gate_up=draw(shape.E, 2 * shape.F, shape.D, dtype=dtype).mul_(shape.D**-0.5),
            down=draw(shape.E, shape.D, shape.F, dtype=dtype).mul_(shape.F**-0.5),
            ids_NK=ids_NK,
            weights_NK=top_NK.softmax(1).to(dtype).float(),
            dy_ND=draw(shape.T, shape.D, dtype=dtype),
        )


@dataclass(frozen=True, slots=True)
class Implementation:
    """`forward` computes y from `leaves` (x, gate_up, down, weights), which require gradients.

    to_problem_layout: functions that convert a gradient to the layout of `Problem`, for leaves in another layout.
    """

    forward: Callable[[], Tensor]
    leaves: dict[str, Tensor]
    to_problem_layout: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)

    def gradients(self, y_ND: Tensor, dy_ND: Tensor) -> dict[str, Tensor]:
        """Return gradients by name, each in the layout of its leaf."""
        return dict(zip(self.leaves, torch.autograd.grad(y_ND, list(self.leaves.values()), dy_ND), strict=True))

    def in_problem_layout(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.to_problem_layout.get(name, lambda g: g)(grad) for name, grad in gradients.items()}


BuildImplementation = Callable[[Problem], Implementation]


def _leaves(problem: Problem, **changed: Tensor) -> dict[str, Tensor]:
    tensors = {"x": problem.x_ND, "gate_up": problem.gate_up, "down": problem.down, "weights": problem.weights_NK}
    return {name: tensor.detach().requires_grad_() for name, tensor in (tensors | changed).items()}


# ---- This project ----


def _build_ours(problem: Problem, kernels: Any) -> Implementation:
    from moe_dualpipe.kernels.experts import experts
    from moe_dualpipe.kernels.routing import expert_order

    shape, leaves = problem.shape, _leaves(problem)

    def forward() -> Tensor:
        # check_ids=False as in the model: ids from a router are always valid.
        order = expert_order(problem.ids_NK, shape.E, shape.rows, kernels, check_ids=False)
        return experts(leaves["x"], leaves["gate_up"], leaves["down"], order, leaves["weights"], kernels=kernels)

    return Implementation(forward, leaves)


build_triton = partial(_build_ours, kernels="triton")
"""This project's Triton kernels."""
build_grouped_mm = partial(_build_ours, kernels="reference")
"""The same operator in plain torch: `torch.nn.functional.grouped_mm` where supported, nothing fused."""


# ---- Another library ----


def build_liger(problem: Problem) -> Implementation:
    """Liger Kernel (0.8.5). Same layout as `Problem`: gate_up_proj [E, 2F, D], gate first; down_proj [E, D, F]."""
    from liger_kernel.ops import LigerFusedMoEFunction  # type: ignore[import-not-found]

    leaves, ids_NK = _leaves(problem), problem.ids_NK.int()
    arguments = leaves["x"], leaves["gate_up"], leaves["down"], ids_NK, leaves["weights"]
    return Implementation(lambda: LigerFusedMoEFunction.apply(*arguments), leaves)


BUILT_IN: dict[str, BuildImplementation] = {
    "triton": build_triton,
    "grouped_mm": build_grouped_mm,
    "liger": build_liger,
}
OURS = ("triton", "grouped_mm")


def find_implementation(name: str) -> BuildImplementation:
    """Return a built-in implementation by name, or another as "module:function". Raises ValueError if not found."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"unknown implementation {name!r}: use one of {', '.join(BUILT_IN)}, or module:function")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import implementation {name!r}: {error}") from error
