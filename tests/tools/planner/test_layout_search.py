"""The search finds what a look at every way finds, keeps within memory, and says why others are slower."""

import dataclasses
import itertools
import math

import pytest
from moe_dualpipe.tools.planner.workload_memory import memory_of

from moe_dualpipe.runtime.layout import Layout
from moe_dualpipe.tools.planner import layout_search
from moe_dualpipe.tools.planner.device import load_device
from moe_dualpipe.tools.planner.layout_search import (
    CHUNKS,
    MICRO_BATCHES,
    RECOMPUTE,
    SCHEDULES,
    SIMULATED,
    USABLE,
    _ways,
    search,
    why_slower,
)  # fmt: skip
from moe_dualpipe.tools.planner.published_shapes import read_shape
from moe_dualpipe.tools.planner.step import step_of
from moe_dualpipe.tools.planner.workload import Workload, layout_of

LOAD = Workload(read_shape("olmoe-1b-7b"), load_device("h100"), layout_of(8), seq=2048, global_batch=64)
LIMIT = USABLE * LOAD.device.memory_gb * 1e9


@pytest.fixture(scope="module")
def found():
    return search(LOAD)


def all_ways():
    """Every way, with its exact step, that fits."""
    schedules = [(name, 1) for name in SCHEDULES if name != "interleaved_1f1b"]
    schedules += [("interleaved_1f1b", chunks) for chunks in CHUNKS]
    for tp, pp, ep in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)):
        for (schedule, vpp), size, recompute in itertools.product(schedules, MICRO_BATCHES, RECOMPUTE):
            way = dataclasses.replace(LOAD, layout=layout_of(8, tp, pp, vpp, ep), schedule=schedule, micro_batch=size,
                                      recompute=recompute)  # fmt: skip
            try:
                if tp * pp > 8 or (pp == 1 and schedule != "1f1b"):
                    continue
                way.check()
            except ValueError:
                continue
            if memory_of(way).total <= LIMIT:
                yield step_of(way).seconds


@pytest.mark.long
def test_the_best_is_the_best_of_all(found):
    assert found.ranked[0].seconds <= 1.01 * min(all_ways())


def test_candidates_fit_and_are_ranked_by_their_simulated_step(found):
    assert len(found.ranked) == SIMULATED and found.tried > 500
    times = [one.seconds for one in found.ranked]
    assert times == sorted(times) and found.best.load == found.ranked[0].load
    layouts = [dataclasses.replace(one.load.layout, chunks=None) for one in found.ranked]
    assert len({*zip(layouts, (one.load.schedule for one in found.ranked), strict=True)}) == SIMULATED
    assert LIMIT < 0.95 * 80e9  # room for the context, libraries and fragments
    for one in found.ranked:
        one.load.check()
        assert memory_of(one.load).total / 1e9 == one.memory_gb <= LIMIT / 1e9
        assert step_of(one.load) == one.step


def test_every_layout_and_schedule_that_fits_is_found_in_its_fastest_way(monkeypatch):
    monkeypatch.setattr(layout_search, "SIMULATED", 10_000)
    device = dataclasses.replace(LOAD.device, memory_gb=45.0)
    load = dataclasses.replace(LOAD, device=device, layout=layout_of(4), global_batch=16)
    fits: dict[tuple[Layout, str], tuple[float, Workload]] = {}
    for step, way in _ways(load):
        key = dataclasses.replace(way.layout, chunks=None), way.schedule
        if memory_of(way).total <= USABLE * 45e9 and step.seconds < fits.get(key, (math.inf,))[0]:
            fits[key] = step.seconds, way
    ranked = {
        (dataclasses.replace(one.load.layout, chunks=None), one.load.schedule): one for one in search(load).ranked
    }
    assert {*ranked} == {*fits} and len(fits) > 10
    assert all(ranked[key].load == way for key, (_, way) in fits.items())


def test_the_quick_estimate_is_near_the_simulated_step():
    """Also of few and of many micro-batches, which are extrapolated from two numbers."""
    for batch in (32, 512):
        load = dataclasses.replace(LOAD, global_batch=batch, layout=layout_of(8, pp=4), host=0.0)
        ways = [(step, way) for step, way in _ways(load) if way.layout == layout_of(8, pp=4) and way.micro_batch == 1]
        assert {way.schedule for _, way in ways} >= {"1f1b", "zb1p", "dualpipe"}
        for step, way in ways:
            assert step.seconds == pytest.approx(step_of(way).seconds, rel=0.25)


def test_experts_are_also_shared_by_tensor_parallel_ranks_and_overlap_on_one_rank(found):
    ways = {(one.load.layout, one.load.schedule) for one in found.ranked}
    assert {(layout_of(8, tp, 1, 1, 8), "dualpipev") for tp in (1, 2)} <= ways


def test_each_slower_candidate_has_a_reason_and_the_best_has_none(found):
    best, *others = found.ranked
    assert why_slower(best, best) == ""
    for one in others:
        reason = why_slower(one, best)
        assert " +" in reason and reason.endswith(" s")
    parts = ("compute", "exposed", "idle", "sums", "optimizer")
    slow = dataclasses.replace(best, step=dataclasses.replace(best.step, idle=best.step.idle + 3))
    assert why_slower(slow, best) == "pipeline bubbles +3.00 s"
    slow = dataclasses.replace(best, step=dataclasses.replace(best.step, idle=best.step.idle + 0.01))
    assert why_slower(slow, best) == "pipeline bubbles +0.01 s"
    saves = dataclasses.replace(best, load=dataclasses.replace(best.load, recompute="norms"))
    slow = dataclasses.replace(best, step=dataclasses.replace(best.step, compute=best.step.compute + 2))
    assert why_slower(slow, saves) == "slower kernels +2.00 s"  # it recomputes less
    slow = dataclasses.replace(slow, load=dataclasses.replace(best.load, recompute="full"))
    assert why_slower(slow, saves) == "recomputation (full) +2.00 s"
    assert sum(getattr(best.step, part) for part in parts) == pytest.approx(best.seconds)


def test_recomputation_is_tried_where_nothing_else_fits():
    load = dataclasses.replace(LOAD, shape=read_shape("tiny"), layout=layout_of(1), global_batch=8, micro_batch=1)
    full = memory_of(dataclasses.replace(load, recompute="full")).total
    assert full < 0.95 * memory_of(dataclasses.replace(load, recompute="attention")).total
    device = dataclasses.replace(LOAD.device, memory_gb=1.01 * full / USABLE / 1e9)
    best = search(dataclasses.replace(load, device=device)).ranked[0].load
    assert (best.recompute, best.micro_batch) == ("full", 1)


def test_a_model_that_does_not_fit_is_refused_with_what_comes_nearest():
    load = dataclasses.replace(LOAD, shape=read_shape("mixtral-8x22b"), layout=layout_of(2))
    with pytest.raises(
        ValueError,
        match=r"mixtral-8x22b on 2 x h100 does not fit: .* needs [\d,]+ GB on a GPU, where a run can use 74 GB",
    ):
        search(load)
    with pytest.raises(ValueError, match="--cp 3 does not divide --seq-len 2048"):
        search(dataclasses.replace(LOAD, layout=layout_of(9, cp=3)))
    with pytest.raises(ValueError, match="--gpus 9 is not a multiple of tp x pp x cp = 1 x 1 x 2"):
        search(dataclasses.replace(LOAD, layout=layout_of(9, cp=2)))
    with pytest.raises(
        ValueError, match="--batch-size 16 cannot be divided into whole micro-batches in any layout of --gpus 17"
    ):
        search(dataclasses.replace(LOAD, layout=layout_of(17), global_batch=16))
