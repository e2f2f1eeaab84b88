"""How the GPU suite times, and how it checks implementations against fp64."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from benchmarks.gpu import correctness
from benchmarks.gpu.context import Operation, rates
from benchmarks.gpu.implementations import Implementation, Problem
from benchmarks.gpu.measure import Clock, single_phase, time_interleaved
from benchmarks.gpu.shapes import Shape

# ---- Times ----


def test_cases_are_interleaved_the_first_call_of_each_turn_is_not_timed_and_one_that_raises_does_not_stop_the_others():
    calls, clock = [], Clock(torch.device("cpu"))
    clock.mark = itertools.count().__next__  # every mark is one second after the previous one

    def case(name, phases, fails=False):
        def run(end_phase):
            calls.append(name)
            if fails:
                raise ValueError("first line\nsecond line")
            for _ in range(phases):
                end_phase()

        return run

    cases = {"a": case("a", 1), "b": case("b", 3), "bad": case("-", 1, fails=True)}
    seconds, failures = time_interleaved(clock, cases, rounds=2, repeats=2)
    assert "".join(calls).replace("-", "") == "aaabbb" * 2
    assert seconds == {"a": [[1.0] * 4], "b": [[1.0] * 4] * 3}
    assert failures == {"bad": "ValueError: first line"}


def test_rates_of_each_phase_and_of_all_together():
    operation = Operation(single_phase(int), {"push": 6, "receive": 2}, "GB/s")
    found = {phase: rate.median for phase, rate in rates(operation, [[2.0] * 3, [1.0] * 3]).items()}
    assert found == {"push": 3, "receive": 2, "all phases": pytest.approx(8 / 3)}
    (rate,) = rates(Operation(single_phase(int), {"": 1}, "us"), [[2e-6, 3e-6, 4e-6, 6e-6, 9e-6]]).values()
    assert (rate.median, rate.low, rate.high, rate.samples) == pytest.approx((4, 3, 6, 5))


# ---- Implementations of the expert MLP are checked against fp64 ----


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
