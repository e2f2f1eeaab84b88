"""The search finds what a look at every way finds, keeps within memory, and says why others are slower."""

import dataclasses
import math

import pytest

from moe_dualpipe.runtime.layout import Layout
from moe_dualpipe.tools.planner import layout_search
from moe_dualpipe.tools.planner.device import load_device
from moe_dualpipe.tools.planner.layout_search import (
    SIMULATED,
    USABLE,
    _ways,
    search,
    why_slower,
)  # fmt: skip
from moe_dualpipe.tools.planner.peak import memory_of
from moe_dualpipe.tools.planner.published_shapes import read_shape
from moe_dualpipe.tools.planner.step import step_of
from moe_dualpipe.tools.planner.workload import Workload, layout_of

LOAD = Workload(read_shape("olmoe-1b-7b"), load_device("h100"), layout_of(8), seq=2048, global_batch=64)
LIMIT = USABLE * LOAD.device.memory_gb * 1e9


@pytest.fixture(scope="module")
def found():
    return search(LOAD)


def test_candidates_fit_and_are_ranked_by_their_simulated_step(found):
    assert len(found) == SIMULATED
    times = [one.seconds for one in found]
    assert times == sorted(times) and LIMIT < 0.95 * 80e9  # room for the context, libraries and fragments
    layouts = [dataclasses.replace(one.load.layout, chunks=None) for one in found]
    assert len({*zip(layouts, (one.load.schedule for one in found), strict=True)}) == SIMULATED
    for one in found:
        one.load.check()
        assert memory_of(one.load).total <= LIMIT and step_of(one.load) == one.step
    ways = {(one.load.layout, one.load.schedule) for one in found}
    assert {(layout_of(8, tp, 1, 1, 8), "dualpipev") for tp in (1, 2)} <= ways  # overlap on one rank, too


def test_every_layout_and_schedule_that_fits_is_found_in_its_fastest_way(monkeypatch):
    monkeypatch.setattr(layout_search, "SIMULATED", 10_000)
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
    for batch in (32, 512):
        load = dataclasses.replace(LOAD, global_batch=batch, layout=layout_of(8, pp=4), host=0.0)
        ways = [(step, way) for step, way in _ways(load) if way.layout == layout_of(8, pp=4) and way.micro_batch == 1]
        assert {way.schedule for _, way in ways} >= {"1f1b", "zb1p", "dualpipe"}
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
