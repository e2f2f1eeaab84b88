"""Implementations of the expert MLP are checked against fp64."""

import pytest
import torch
from torch.nn import functional as F

from benchmarks.gpu import correctness
from benchmarks.gpu.implementations import Implementation, Problem
from benchmarks.gpu.shapes import Shape


def textbook(problem: Problem) -> Implementation:
    """Run every expert on every token and mask the results: slow, but simple."""
    leaves = {
        "x": problem.x_ND.clone().requires_grad_(), "gate_up": problem.gate_up.clone().requires_grad_(),
        "down": problem.down.clone().requires_grad_(), "weights": problem.weights_NK.clone().requires_grad_(),
    }  # fmt: skip

    def forward():
        y = torch.zeros_like(problem.x_ND)
        for e in range(problem.shape.E):
            gate, up = (leaves["x"] @ leaves["gate_up"][e].T).chunk(2, 1)
            weights_N = (leaves["weights"] * (problem.ids_NK == e)).sum(1)
            y = y + weights_N[:, None] * ((F.silu(gate) * up) @ leaves["down"][e].T)
        return y

    return Implementation(forward, leaves)


@pytest.mark.parametrize("name", [None, "x", "gate_up", "down", "weights"])
def test_a_wrong_gradient_is_reported_by_name(name):
    problem = Problem.random(Shape(90, 12, 5, 6, 3), torch.float32, torch.device("cpu"))
    right = textbook(problem)
    tried = Implementation(right.forward, right.leaves, {name: lambda g: g * 1.01} if name else {})
    found = correctness.relative_errors(problem, tried, correctness.compute_reference(problem))
    message = correctness.tolerance_violations(found, torch.float32)
    assert message is None if name is None else message.startswith(f"relative error above 0.001: {name} 0.01")
