"""How many layers each stage should have: the fastest division within a memory, found by trying all of them."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.runtime.layout import Layout
from moe_dualpipe.schedule import build, simulate
from moe_dualpipe.tools.planner.device import load_device
from moe_dualpipe.tools.planner.peak import memory_of
from moe_dualpipe.tools.planner.published_shapes import read_shape
from moe_dualpipe.tools.planner.run_costs import costs_of_run, layers_of_run
from moe_dualpipe.tools.planner.step import step_of
from moe_dualpipe.tools.planner.uneven import best_layers, divide_within
from moe_dualpipe.tools.planner.workload import Workload
from tests.support.ranks import run_ranks
from tests.support.runs import losses, make_run, train_each
from tests.support.runs import settings as run_settings

LOAD = Workload(
    read_shape("deepseek-v3"), load_device("h800"), Layout(8, 32, 16), global_batch=1024, schedule="dualpipe",
    recompute="attention",
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_a_division_has_the_smallest_largest_part_of_all_divisions(costs, most):
    def largest(sizes):
        ends = [0, *itertools.accumulate(sizes)]
        return max(sum(costs[start:end]) for start, end in itertools.pairwise(ends))

    ways = [w for w in itertools.product(*(range(1, n + 1) for n in most)) if sum(w) == len(costs)]
    found = divide_within(costs, most)
    assert (found in ways and largest(found) == min(map(largest, ways))) if ways else found == ()


@pytest.mark.parametrize("changes", [
    {}, {"schedule": "1f1b"}, {"schedule": "dualpipev"},
], ids=str)  # fmt: skip
def test_the_layers_of_stages_are_never_slower_and_fit_into_memory_if_a_division_does(changes):
    load = replace(LOAD, **changes)
    seconds = step_of(load).seconds
    free = replace(load, layers=best_layers(load, float("inf")))
    assert step_of(free).seconds <= seconds and sum(free.layers) in (0, 61)
    limit = 0.97 * memory_of(free).total
    if found := best_layers(load, limit):
        assert memory_of(replace(load, layers=found)).total <= limit
    assert best_layers(load, 1.0) == ()  # nothing fits


def test_on_a_known_gpu_the_planner_decides_and_elsewhere_flops(monkeypatch, tmp_path):
    run = make_run(run_settings(tmp_path / "run", schedule="1f1b", pp=2), 0, 2)
    arguments = run.config, run.schedule, run.layout, torch.bfloat16
    for name, known in (("Unheard-of", False), ("NVIDIA H100 80GB HBM3", True)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        costs: Any = costs_of_run(*arguments, torch.device("cuda", 0), ())
        assert (costs.FB is not None) == known and len(costs.F) == 2
        assert len(layers_of_run(*arguments, torch.device("cuda", 0), None)) in ((0, 2) if known else (0,))
    in_fp32: Any = costs_of_run(*arguments[:3], torch.float32, torch.device("cuda", 0), ())
    assert in_fp32.FB is None  # no device file has a peak for it
    costs = costs_of_run(*arguments, torch.device("cpu"), (1, 1))
    assert sum(costs.F) == pytest.approx(1) and tuple(2 * share for share in costs.F) == costs.B


def test_a_filled_schedule_runs_with_the_same_losses(tmp_path):
    plain = run_settings(tmp_path / "plain", steps=2, seq_len=16, batch_size=8)
    filled = run_settings(tmp_path / "filled", steps=2, seq_len=16, batch_size=8, schedule="dualpipe+fill")
    run = make_run(run_settings(Path(tmp_path, "run"), batch_size=8, schedule="auto+fill"), 0, 2)
    assert run.choice.name == "dualpipe+fill" and run.schedule.name in ("dualpipe", "dualpipe+fill")
    costs = costs_of_run(run.config, run.schedule, run.layout, run.dtype, run.device, ())
    assert simulate(run.schedule, costs).makespan <= simulate(build("dualpipe", 2, 8), costs).makespan
    first, second = run_ranks(2, train_each, [plain, filled])[0]
    assert losses(second) == pytest.approx(losses(first), rel=1e-6) and losses(second)[1] == losses(first)[1]
