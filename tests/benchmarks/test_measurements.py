"""How the GPU suite times, checks against fp64, and computes limits: FLOPs, bytes, and times of transfers by hand."""

import itertools
import re

import pytest
import torch
from torch.nn import functional as F

from benchmarks.gpu import correctness, roofline
from benchmarks.gpu.implementations import Implementation, Problem
from benchmarks.gpu.measure import Clock, time_interleaved
from benchmarks.gpu.shapes import Shape
from benchmarks.gpu.transfer_roofline import SETTINGS, Gpu, Setting

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
    times = time_interleaved(clock, cases, rounds=2, repeats=2)
    assert "".join(calls).replace("-", "") == "aaabbb" * 2
    assert times.seconds == {"a": [[1.0] * 4], "b": [[1.0] * 4] * 3}
    assert times.failures == {"bad": "ValueError: first line"}


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


# ---- FLOPs and bytes of the roofline model, against numbers computed by hand ----


def test_flops_and_bytes_of_each_launch_computed_by_hand():
    """T=2, D=3, F=5, E=7, K=4: M=8 rows; [8, 3] x [3, 5] takes 240 FLOPs."""
    launches = roofline.launches_of(Shape(2, 3, 5, 7, 4))
    forward = {k.name: (k.flops, k.bytes) for k in launches["forward"]}
    assert forward == {
        "up": (480, 2 * (2 * 3 + 7 * 10 * 3 + 8 * 10 + 8 * 5)),  # x, weights, z, h
        "down": (240, 2 * (8 * 5 + 7 * 3 * 5 + 8 * 3)),  # h, weights, outputs
        "sum": (0, 2 * (8 * 3 + 2 * 3)),
    }
    backward = {k.name: (k.flops, k.bytes) for k in launches["backward"]}
    assert backward["down_backward"] == (
        240,
        2 * (2 * 3 + 7 * 3 * 5 + 8 * 10 + 8 * 10 + 8 * 5),
    )  # dy, weights, z, dz, h
    assert backward["wgrad of gate_up"] == (480, 2 * (2 * 3 + 8 * 10) + 4 * 7 * 10 * 3)  # x, dz; fp32 gradients
    assert backward["wgrad of down"] == (240, 2 * (2 * 3 + 8 * 5) + 4 * 7 * 3 * 5)


# ---- Minimum times of dispatch and combine from data sheets ----


SLOW = Gpu("slow", memory=100, nvlink=10, network=1)


@pytest.mark.parametrize("destinations", [1, 2, 3, 6])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_rows_per_token_are_those_of_all_choices_of_experts(destinations, top_k):
    choices = list(itertools.combinations(range(6), top_k))
    rows = sum(len({expert * destinations // 6 for expert in chosen}) for chosen in choices)
    setting = Setting(SLOW, 1, 6, False, E=6, K=top_k)
    assert setting.rows_per_token(destinations) == pytest.approx(rows / len(choices))


def test_times_by_hand():
    """One expert per token, so one row: of 1,000 bytes here. A rank keeps a fourth of them, and a node half."""
    sizes = {"T": 10**6, "D": 500, "E": 4, "K": 1}
    within = Setting(SLOW, 1, 4, False, **sizes).seconds()
    assert within == pytest.approx((0.75 / 10, 0.75 / 10 + 2 / 100, 0.75 / 10 + 2 / 100))
    assert Setting(SLOW, 2, 2, True, **sizes).seconds()[0] == pytest.approx(0.5 / 1)
    fast_network = Gpu("fast", memory=100, nvlink=1, network=10)
    assert Setting(fast_network, 2, 2, True, **sizes).seconds()[0] == pytest.approx(0.5 / 1)  # NVLink takes longer
    assert Setting(fast_network, 2, 2, False, **sizes).seconds()[0] == pytest.approx(0.25 / 1)


def test_no_published_rate_exceeds_the_limit_of_the_links():
    for setting in SETTINGS:
        limit = setting.logical_rates()[0]
        assert all(int(rate) < limit for pair in re.findall(r"(\d+) / (\d+)", setting.published) for rate in pair)
