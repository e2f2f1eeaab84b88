"""The search finds what a look at every way finds, keeps within memory, and says why others are slower."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.runtime.layout import Layout
from moe_dualpipe.schedule import NAMES, build, simulate
from moe_dualpipe.schedule.build import takes_chunks
from moe_dualpipe.tools.planner import Workload, layout_of, layout_search, load_device, read_shape
from moe_dualpipe.tools.planner.layout_search import (
    SIMULATED,
    USABLE,
    _ways,
    search,
    why_slower,
)  # fmt: skip
from moe_dualpipe.tools.planner.layout_search import WITH_TENSOR_PARALLELISM as OTHERS
from moe_dualpipe.tools.planner.stages import best_layers, divide_within, memory_of, predict_run
from moe_dualpipe.tools.planner.step import step_of
from moe_dualpipe.training.resolve import costs_by_flops
from tests.support.ranks import run_ranks
from tests.support.runs import losses, make_run, train_each
from tests.support.runs import settings as run_settings

LOAD = Workload(
    read_shape("olmoe-1b-7b"), load_device("h100"), layout_of(8), seq=2048, global_batch=32, cuda_graphs="full"
)
LIMIT = USABLE * LOAD.device.memory_gb * 1e9


@pytest.fixture(scope="module")
def found():
    return search(LOAD)


def test_candidates_fit_and_are_ranked_by_their_simulated_step(found):
    assert [sum((one.load.layout.tp > 1) == tp for one in found) for tp in (False, True)] == [SIMULATED, OTHERS]
    times = [one.seconds for one in found]
    assert times == sorted(times) and LIMIT < 0.95 * 80e9  # room for the context, libraries and fragments
    layouts = [dataclasses.replace(one.load.layout, chunks=None) for one in found]
    assert len({*zip(layouts, (one.load.schedule for one in found), strict=True)}) == len(found)
    for one in found:
        one.load.check()
        assert memory_of(one.load).total <= LIMIT and step_of(one.load) == one.step
    ways = {(one.load.layout, one.load.schedule) for one in found}
    assert (layout_of(8, 1, 1, 1, 8), "dualpipev") in ways  # overlap on one rank, too


def test_every_layout_and_schedule_that_fits_is_found_in_its_fastest_way(monkeypatch):
    for number in ("SIMULATED", "WITH_TENSOR_PARALLELISM"):
        monkeypatch.setattr(layout_search, number, 10_000)
    device = dataclasses.replace(LOAD.device, memory_gb=90.0)
    load = dataclasses.replace(LOAD, device=device, layout=layout_of(2), global_batch=16)
    fits: dict[tuple[Layout, str], tuple[float, Workload]] = {}
    for step, way in _ways(load):
        key = dataclasses.replace(way.layout, chunks=None), way.schedule
        if memory_of(way).total <= USABLE * 90e9 and step.seconds < fits.get(key, (math.inf,))[0]:
            fits[key] = step.seconds, way
    ranked = {(dataclasses.replace(one.load.layout, chunks=None), one.load.schedule): one for one in search(load)}
    assert {*ranked} == {*fits} and len(fits) > 5
    assert all(ranked[key].load == way for key, (_, way) in fits.items())


def test_a_slower_candidate_has_a_reason_and_the_best_has_none(found):
    best, *others = found
    assert why_slower(best, best) == "" and all(" +" in why_slower(one, best) for one in others)
    slow = dataclasses.replace(best, load=dataclasses.replace(best.load, recompute="full"))
    more = slow.seconds - best.seconds
    assert why_slower(slow, best) == f"recomputation (full) +{more:.2f} s" and more > 0


def test_the_quick_estimate_is_near_the_simulated_step():
    """Also of few and of many micro-batches, which are extrapolated from two numbers."""
    for batch in (32, 128):
        load = dataclasses.replace(LOAD, global_batch=batch, layout=layout_of(8, pp=4), host=0.0)
        ways = [(step, way) for step, way in _ways(load) if way.layout == layout_of(8, pp=4) and way.micro_batch == 1]
        assert {way.schedule for _, way in ways} == {name for name in NAMES if not takes_chunks(name)}
        for step, way in ways:
            assert step.seconds == pytest.approx(step_of(way).seconds, rel=0.25)


@pytest.mark.parametrize("changes,said", [
    ({"shape": read_shape("mixtral-8x22b"), "layout": layout_of(2)},
     r"mixtral-8x22b on 2 x h100 does not fit: .* needs [\d,]+ GB on a GPU, where a run can use 74 GB"),
    ({"layout": layout_of(9, cp=3)}, "--cp 3 does not divide --seq-len 2048"),
    ({"layout": layout_of(17), "global_batch": 16},
     "--batch-size 16 cannot be divided into whole micro-batches in any layout of --gpus 17"),
])  # fmt: skip
def test_what_cannot_run_is_refused_with_what_comes_nearest(changes, said):
    with pytest.raises(ValueError, match=said):
        search(dataclasses.replace(LOAD, **changes))


# ---- How many layers each stage should have: the fastest division within a memory ----


V3 = Workload(
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
    load = dataclasses.replace(V3, **changes)
    seconds = step_of(load).seconds
    free = dataclasses.replace(load, layers=best_layers(load, float("inf")))
    assert step_of(free).seconds <= seconds and sum(free.layers) in (0, 61)
    limit = 0.97 * memory_of(free).total
    if found := best_layers(load, limit):
        assert memory_of(dataclasses.replace(load, layers=found)).total <= limit
    assert best_layers(load, 1.0) == ()  # nothing fits


def test_on_a_known_gpu_the_planner_decides_and_elsewhere_flops(monkeypatch, tmp_path):
    run = make_run(run_settings(tmp_path / "run", schedule="1f1b", pp=2), 0, 2)
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Unheard-of")
    assert predict_run(run.config, run.choice, torch.bfloat16, gpu) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    assert predict_run(run.config, run.choice, torch.bfloat16, torch.device("cpu")) is None
    assert predict_run(run.config, run.choice, torch.float32, gpu) is None  # no device file has a peak for it
    known = predict_run(run.config, run.choice, torch.bfloat16, gpu)
    assert known and len(known.best_layers(math.inf)) in (0, 2)
    costs: Any = known.costs(())
    assert costs.FB is not None and len(costs.F) == 2
    costs = costs_by_flops(run.config, 2, (1, 1))
    assert sum(costs.F) == pytest.approx(1) and tuple(2 * share for share in costs.F) == costs.B


def test_a_filled_schedule_runs_with_the_same_losses(tmp_path):
    plain = run_settings(tmp_path / "plain", steps=2, seq_len=16, batch_size=8)
    filled = run_settings(tmp_path / "filled", steps=2, seq_len=16, batch_size=8, schedule="dualpipe+fill")
    run = make_run(run_settings(Path(tmp_path, "run"), batch_size=8, schedule="auto+fill"), 0, 2)
    assert run.choice.name == "dualpipe+fill" and run.schedule.name in ("dualpipe", "dualpipe+fill")
    costs = costs_by_flops(run.config, run.schedule.num_stages, ())
    assert simulate(run.schedule, costs).makespan <= simulate(build("dualpipe", 2, 8), costs).makespan
    first, second = run_ranks(2, train_each, [plain, filled])[0]
    assert losses(second) == pytest.approx(losses(first), rel=1e-6) and losses(second)[1] == losses(first)[1]
