"""The parts of the GPU suite: what it counts, how it takes turns, what it calls right, and what it says of goals."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import correctness, figures, gpu_tests, precompile, report
from benchmarks.gpu.context import Context
from benchmarks.gpu.goals import GOALS, evaluate_goals
from benchmarks.gpu.gpu_tests import is_acceptable, parse_pytest_result
from benchmarks.gpu.implementations import Implementation, Problem, find_implementation
from benchmarks.gpu.measure import Clock, Quartiles, rate_statistics, relative_error, time_interleaved
from benchmarks.gpu.shapes import GOAL_SHAPE, SHAPES, TRAINING_SHAPE, Shape
from moe_dualpipe.models import ModelConfig, StageOptions, build_model, next_token_loss

# ---- What is counted ----


def test_operations_and_bytes_at_the_shape_of_the_goals():
    assert str(GOAL_SHAPE) == "T=32768 D=4096 F=512 E=128 K=8"
    assert GOAL_SHAPE.rows == 262_144
    assert GOAL_SHAPE.forward_flops == 3_298_534_883_328  # 6 x 262144 x 4096 x 512
    assert GOAL_SHAPE.backward_flops == 2 * GOAL_SHAPE.forward_flops
    assert GOAL_SHAPE.saved_bytes() == 24_576  # 2 x 4096 + 4 x 8 x 512
    assert SHAPES[1].saved_bytes() == 28 * 1024  # the Qwen3-30B-A3B layer: 28 KiB


def test_bytes_that_must_move():
    shape = Shape(T=3, D=8, F=5, E=4, K=2)
    assert shape.permute_bytes() == 2 * 8 * 3 + 2 * 8 * 6 + 8 * 6  # x, rows, an int64 for each row
    assert shape.unpermute_bytes() == 2 * 8 * 6 + 2 * 8 * 3 + (8 + 4) * 6  # a position and a weight for each
    assert shape.unpermute_bytes(4) == 4 * 8 * 9 + 72


# ---- Taking turns ----


class Ticking(Clock):
    """Each mark is one second after the last."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.now = 0.0

    def mark(self):
        self.now += 1
        return self.now


def test_turns_alternate_and_the_first_call_of_each_does_not_count():
    calls = []

    def case(name, parts):
        def run(end_phase):
            calls.append(name)
            for _ in range(parts):
                end_phase()

        return run

    times = time_interleaved(Ticking(), {"a": case("a", 1), "b": case("b", 3)}, rounds=2, repeats=2)
    assert "".join(calls) == "aaabbb" * 2
    assert times.seconds == {"a": [[1.0] * 4], "b": [[1.0] * 4] * 3}
    assert times.failures == {}


def test_a_case_that_raises_loses_its_turns_only():
    def bad(_lap):
        raise ValueError("first line\nsecond line")

    times = time_interleaved(Ticking(), {"bad": bad, "good": lambda end_phase: end_phase()}, rounds=3, repeats=1)
    assert times.failures == {"bad": "ValueError: first line"}
    assert times.seconds == {"good": [[1.0] * 3]}


def test_quartiles_and_rates():
    assert Quartiles.of([4.0, 1.0, 2.0, 3.0, 5.0]) == Quartiles(3.0, 2.0, 4.0, 5)
    assert Quartiles.of([2.0]) == Quartiles(2.0, 2.0, 2.0, 1)
    assert rate_statistics([0.5, 0.25, 1.0], 10, "GB/s") == {
        "unit": "GB/s", "median": 20.0, "low": 15.0, "high": 30.0, "samples": 3
    }  # fmt: skip


# ---- Right before fast ----


def textbook(problem: Problem) -> Implementation:
    """Every expert on every token, masked: slow and hard to get wrong."""
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
def test_the_reference_of_chosen_tokens_and_experts_is_the_whole_operator(tokens):
    problem = Problem.random(Shape(tokens, 12, 5, 6, 3), torch.float64, torch.device("cpu"))
    found = correctness.relative_errors(problem, textbook(problem), correctness.compute_reference(problem))
    if tokens == 1:  # the last expert may have no rows: 0 of 0
        found = {name: error for name, error in found.items() if not math.isnan(error)}
    assert all(error < 1e-7 for error in found.values()), found  # the routing weights are fp32


def test_each_kind_of_mistake_is_found():
    problem = Problem.random(Shape(90, 12, 5, 6, 3), torch.float32, torch.device("cpu"))
    expected = correctness.compute_reference(problem)
    found = correctness.relative_errors(problem, textbook(problem), expected)
    assert correctness.tolerance_violations(found, torch.float32) is None
    for name in ("x", "gate_up", "down", "weights"):
        right = textbook(problem)
        wrong = Implementation(right.forward, right.leaves, {name: lambda g: g * 1.01})
        found = correctness.relative_errors(problem, wrong, expected)
        words = correctness.tolerance_violations(found, torch.float32)
        assert words is not None
        assert words.startswith(f"relative error above 0.001: {name} 0.01")


def test_no_number_is_no_agreement():
    assert correctness.tolerance_violations({"y": math.nan}, torch.bfloat16) == "relative error above 0.02: y nan"
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)


def test_a_problem_is_exact_in_its_dtype_and_has_distinct_experts():
    problem = Problem.random(Shape(50, 8, 4, 5, 3), torch.bfloat16, torch.device("cpu"))
    assert torch.equal(problem.weights_NK, problem.weights_NK.bfloat16().float())
    assert all(len(set(row)) == 3 for row in problem.ids_NK.tolist())
    assert problem.x_ND.float().std() == pytest.approx(1, abs=0.2)


def test_loop_experts_are_the_built_in_ones():
    config = ModelConfig(hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, dense_size=16)
    tokens = torch.randint(256, (2, 5))  # 10 tokens in 8 experts: some get none
    gradients = {}
    for experts in ("swiglu", "benchmarks.gpu.loop_experts:LoopExperts"):
        model = build_model(dataclasses.replace(config, experts=experts), options=StageOptions(kernels="reference"))
        next_token_loss(model(tokens), tokens).backward()
        gradients[experts] = {name: p.grad for name, p in model.named_parameters()}
    built_in, loop = gradients.values()
    assert any("experts" in name for name in loop)
    torch.testing.assert_close(loop, built_in)  # equal weights at the start, and the same function


def test_an_unknown_contestant_is_named():
    with pytest.raises(ValueError, match="unknown contestant 'x': there are triton, grouped_mm, liger"):
        find_implementation("x")
    with pytest.raises(ValueError, match="cannot find the contestant 'math:nothing'"):
        find_implementation("math:nothing")


# ---- Compiling ahead ----


def test_each_worker_compiles_its_part_of_the_configurations_and_launches_none():
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


def test_every_shape_can_be_compiled_ahead():
    assert set(precompile.ALL_SHAPES) == {*SHAPES, TRAINING_SHAPE}


# ---- Words ----


@pytest.mark.parametrize(
    ("code", "last", "outcome"),
    [
        (0, "12 passed, 1 skipped in 20.10s", "passed"),
        (0, "4 skipped in 1.00s", "none ran"),
        (5, "no tests ran in 0.01s", "none ran"),
        (1, "1 failed, 11 passed in 9.99s", "failed"),
        (-11, "", "failed"),
    ],
)
def test_what_pytest_says_of_the_gpu_tests(code, last, outcome):
    record = parse_pytest_result(code, f"......\n{last}\n\n")
    assert record["outcome"] == outcome
    assert is_acceptable(record, smoke=False) == (outcome == "passed")
    assert is_acceptable(record, smoke=True) == (outcome in ("passed", "none ran"))


@pytest.mark.parametrize(
    ("body", "outcome", "summary", "seconds"),
    [
        ("assert True", "passed", "2 passed in", 60),
        ("assert n", "failed", "1 failed, 1 passed in", 60),
        ("pytest.skip('no GPU')", "none ran", "2 skipped in", 60),
        ("time.sleep(60) if n else None", "timed out", "stopped after 3 s", 3),
    ],
)
def test_gpu_tests_run_in_a_process_of_their_own(tmp_path, monkeypatch, body, outcome, summary, seconds):
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q --durations=8\n")
    code = f"import time, pytest\n@pytest.mark.parametrize('n', [0, 1])\ndef test_it(n):\n    {body}\n"
    (folder / "test_it.py").write_text(code)
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    context = Context(
        device=torch.device("cpu"), smoke=False, out=tmp_path, implementations=(), tuning_shapes=0, training_seconds=0,
        deadline=seconds, now=lambda: 0.0,
    )  # fmt: skip
    record = {}
    gpu_tests.run(context, record)
    assert record["outcome"] == outcome
    assert record["summary"].startswith(summary)


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ({"tests": {"outcome": "passed"}, "experts": {}}, 0),
        ({"tests": {"outcome": "failed"}, "experts": {}}, 1),
        ({"tests": {"outcome": "none ran"}, "experts": {}}, 1),
        ({"tests": {"outcome": "passed"}, "experts": {"status": "failed", "reason": ""}}, 1),
        ({"tests": {"outcome": "passed"}, "experts": {"status": "skipped", "reason": ""}}, 0),
        ({"tests": {"outcome": "passed"}, "experts": {"shapes": [{"contestants": {"liger": {"status": "wrong"}}}]}}, 0),
        (
            {"tests": {"outcome": "passed"}, "experts": {"shapes": [{"contestants": {"triton": {"status": "wrong"}}}]}},
            1,
        ),
    ],
)
def test_the_exit_code_says_whether_ours_can_be_trusted(results, code):
    context = SimpleNamespace(results=results, smoke=False)
    assert gpu.exit_code(context, SimpleNamespace(only=["tests", "experts"])) == code


def measured_results(ours=520.0, liger=330.0, share=0.9):
    def timed(value):
        part = {"median": value, "low": value - 5, "high": value + 5, "share": value / 780}
        return {
            "status": "timed", "forward": part, "backward": part, "both": part, "kept_bytes_per_token": 24_800.0,
            "errors": dict.fromkeys(("y", "x", "weights", "gate_up", "down"), 4e-3),
        }  # fmt: skip

    contestants = {
        "triton": timed(ours), "liger": timed(liger),
        "scattermoe": {"status": "not installed", "reason": "No module named 'scattermoe'"},
    }  # fmt: skip
    shape = {name: getattr(GOAL_SHAPE, name) for name in "TDFEK"} | {
        "note": "",
        "kept_bytes_formula": GOAL_SHAPE.saved_bytes(),
    }
    moved = {"shape": shape, "permute": {}, "unpermute": {"triton": {"share": share}}}
    return {
        "experts": {"shapes": [{"shape": shape, "contestants": contestants}]},
        "permute": {"shapes": [moved]},
    }  # fmt: skip


def test_goals_are_met_missed_or_not_measured():
    verdicts = {v.title: (v.measured, v.status) for v in evaluate_goals(measured_results(ours=490.0, share=0.8))}
    assert verdicts["forward, TFLOP/s"] == ("490", "missed")
    assert verdicts["forward + backward, TFLOP/s"] == ("490", "met")
    assert verdicts["forward, times Liger"] == ("1.48x", "missed")
    assert verdicts["forward, times ScatterMoE"] == ("-", "not measured")
    assert verdicts["kept for backward, bytes a token (2D + 4KF and indices)"] == ("24,800", "met")
    assert verdicts["combine, share of a copy's rate"] == ("80%", "missed")
    assert {v.status for v in evaluate_goals({})} == {"not measured"}
    assert len(GOALS) == 9


def test_a_table_of_the_experts():
    table = report.experts_table(measured_results()["experts"], "both").splitlines()
    assert table == [
        "| T, D, F, E, K | ours | Liger | ScatterMoE | ours / best other |",
        "|---|---|---|---|---|",
        "| 32768, 4096, 512, 128, 8 | 520 (67%) | 330 (42%) | not installed | 1.58 (Liger) |",
    ]


def test_numbers_as_a_person_writes_them():
    assert [report.format_number(v) for v in (4321.6, 100.4, 12.345, 0.012345)] == ["4,322", "100", "12.3", "0.0123"]


def test_figures_of_a_shape_where_one_is_missing(tmp_path):
    pytest.importorskip("matplotlib")
    (path,) = figures.draw(measured_results(), tmp_path)
    assert path.stat().st_size > 10_000
