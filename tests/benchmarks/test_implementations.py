"""Implementations of the expert MLP: how they are found, checked against fp64 and compiled ahead of time."""

import dataclasses
import math

import pytest
import torch
from torch.nn import functional as F

from benchmarks.gpu import correctness, precompile
from benchmarks.gpu.implementations import Implementation, Problem, find_implementation
from benchmarks.gpu.shapes import Shape
from moe_dualpipe.models import ModelConfig, StageOptions, build_model, next_token_loss


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


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_reference_values_agree_with_the_textbook_implementation(tokens):
    problem = Problem.random(Shape(tokens, 12, 5, 6, 3), torch.float64, torch.device("cpu"))
    found = correctness.relative_errors(problem, textbook(problem), correctness.compute_reference(problem))
    if tokens == 1:  # an expert without rows has a relative error of 0/0
        found = {name: error for name, error in found.items() if not math.isnan(error)}
    assert all(error < 1e-7 for error in found.values()), found  # the routing weights are fp32


def test_a_wrong_gradient_is_reported_by_name():
    problem = Problem.random(Shape(90, 12, 5, 6, 3), torch.float32, torch.device("cpu"))
    expected = correctness.compute_reference(problem)
    found = correctness.relative_errors(problem, textbook(problem), expected)
    assert correctness.tolerance_violations(found, torch.float32) is None
    for name in ("x", "gate_up", "down", "weights"):
        right = textbook(problem)
        wrong = Implementation(right.forward, right.leaves, {name: lambda g: g * 1.01})
        found = correctness.relative_errors(problem, wrong, expected)
        message = correctness.tolerance_violations(found, torch.float32)
        assert message is not None
        assert message.startswith(f"relative error above 0.001: {name} 0.01")


def test_loop_experts_compute_the_same_as_the_built_in_experts():
    config = ModelConfig(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, dense_size=16)
    tokens = torch.randint(256, (2, 5))  # 10 tokens, 8 experts: some experts get none
    gradients = {}
    for experts in ("swiglu", "benchmarks.gpu.loop_experts:LoopExperts"):
        model = build_model(dataclasses.replace(config, experts=experts), options=StageOptions(kernels="reference"))
        next_token_loss(model(tokens), tokens).backward()
        gradients[experts] = {name: p.grad for name, p in model.named_parameters()}
    built_in, loop = gradients.values()
    assert any("experts" in name for name in loop)
    torch.testing.assert_close(loop, built_in)  # same initial weights, same function


def test_errors_name_an_unknown_implementation():
    with pytest.raises(ValueError, match="unknown implementation 'x': use one of triton, grouped_mm, liger"):
        find_implementation("x")
    with pytest.raises(ValueError, match="cannot import implementation 'math:nothing'"):
        find_implementation("math:nothing")


# ---- Precompilation ----


def test_a_worker_compiles_its_share_of_the_configurations_without_launching():
    autotuner = pytest.importorskip("triton.runtime.autotuner")
    calls = []

    class Kernel:
        def run(self, *args, **kwargs):
            calls.append((args, kwargs))

    configs = [autotuner.Config({"BLOCK": 16 << i}, num_warps=4, num_stages=2) for i in range(5)]
    tuner = object.__new__(autotuner.Autotuner)
    tuner.configs, tuner.fn = configs, Kernel()
    before = autotuner.Autotuner.run
    with precompile.compile_without_launching(1, 2):
        tuner.run(7, grid=(1,), warmup=False)
    assert autotuner.Autotuner.run is before
    assert [kwargs["BLOCK"] for _, kwargs in calls] == [32, 128]
    assert all(args == (7,) and kwargs["warmup"] for args, kwargs in calls)
