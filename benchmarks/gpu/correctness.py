"""Compare an implementation with fp64 at the full size at which it will be timed.

Recomputing a whole large layer in fp64 would take longer than the benchmark. But the output, the input gradient and the
routing-weight gradient of a token depend on that token only, and the weight gradients of an expert depend on that
expert's rows only. So the implementation runs at full size, and then a few tokens (the first and last) and a few
experts (the first, last and busiest) are compared in full. Index overflows at the far end are still found.

N tokens, D model dim, F expert hidden size, E experts, K experts per token; M rows of one expert.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .implementations import Implementation, Problem
from .measure import relative_error

# Relative norm error against fp64. Expected from rounding: 3e-4 with tf32; 3e-3 to 8e-3 with bf16 operands where z and
# the activations are rounded once more.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 2e-2}
NUM_CHECKED_TOKENS = 64


@dataclass(frozen=True, slots=True)
class ReferenceValues:
    """fp64 values by name: y, x and weights for each of `tokens`, gate_up and down for each of `experts`."""

    tokens: Tensor
    experts: Tensor
    values: dict[str, Tensor]


def relative_errors(problem: Problem, implementation: Implementation, expected: ReferenceValues) -> dict[str, float]:
    """Run forward and backward once. Return the relative error of the output y and of each gradient, by name."""
    y_ND = implementation.forward()
    if y_ND.shape != problem.x_ND.shape:
        raise ValueError(f"the output must have the shape of x, {[*problem.x_ND.shape]}: got {[*y_ND.shape]}")
    grads = implementation.in_problem_layout(implementation.gradients(y_ND, problem.dy_ND))
    tokens, experts = expected.tokens, expected.experts
    found = {"y": y_ND.detach()[tokens], "x": grads["x"][tokens], "weights": grads["weights"][tokens]}
    found |= {name: grads[name][experts] for name in ("gate_up", "down")}
    return {name: relative_error(found[name], expected.values[name]) for name in found}


def tolerance_violations(errors: dict[str, float], dtype: torch.dtype) -> str | None:
    """Describe the errors above the tolerance of `dtype`; None if there are none. NaN is above any tolerance."""
    allowed = TOLERANCE[dtype]
    too_large = {name: error for name, error in errors.items() if not error <= allowed}
    if not too_large:
        return None
    listed = ", ".join(f"{name} {error:.2g}" for name, error in too_large.items())
    return f"relative error above {allowed:g}: {listed}"


def compute_reference(problem: Problem) -> ReferenceValues:
    """Compute in fp64 the values that implementations are compared with."""
    device, shape = problem.x_ND.device, problem.shape
    half, every = min(NUM_CHECKED_TOKENS, shape.T) // 2, torch.arange(shape.T, device=device)
    tokens = torch.cat([every[:half], every[-half:]])
    busiest = int(problem.ids_NK.flatten().bincount(minlength=shape.E).argmax())
    experts = torch.tensor(sorted({0, busiest, shape.E - 1}), device=device)
    checked_N = torch.zeros(shape.T, dtype=torch.bool, device=device).index_fill(0, tokens, True)
    y_ND, dx_ND = torch.zeros(2, shape.T, shape.D, dtype=torch.float64, device=device)
    dweights_NK = torch.zeros(shape.T, shape.K, dtype=torch.float64, device=device)
    for e in range(shape.E):
        n_M, k_M = ((problem.ids_NK == e) & checked_N[:, None]).nonzero(as_tuple=True)
        y_MD, dx_MD, dweights_M, _, _ = _expert_in_fp64(problem, e, n_M, k_M)
        y_ND.index_add_(0, n_M, y_MD)
        dx_ND.index_add_(0, n_M, dx_MD)
        dweights_NK[n_M, k_M] = dweights_M
    grads = [_expert_in_fp64(problem, e, *(problem.ids_NK == e).nonzero(as_tuple=True))[3:] for e in experts.tolist()]
    gate_up, down = zip(*grads, strict=True)
    values = {"y": y_ND[tokens], "x": dx_ND[tokens], "weights": dweights_NK[tokens]}
    return ReferenceValues(tokens, experts, values | {"gate_up": torch.stack(gate_up), "down": torch.stack(down)})


def _expert_in_fp64(problem: Problem, e: int, n_M: Tensor, k_M: Tensor) -> tuple[Tensor, ...]:
    """For the choices (n, k) of expert e: its part of y, and the gradients of x, weights, gate_up and down."""
    inputs = problem.x_ND[n_M], problem.weights_NK[n_M, k_M], problem.gate_up[e], problem.down[e]
    leaves = [t.double().requires_grad_() for t in inputs]
    x_MD, weights_M, gate_up, down = leaves
    gate_MF, up_MF = (x_MD @ gate_up.T).chunk(2, dim=1)
    y_MD = weights_M[:, None] * ((F.silu(gate_MF) * up_MF) @ down.T)
    return y_MD.detach(), *torch.autograd.grad(y_MD, leaves, problem.dy_ND[n_M].double())
