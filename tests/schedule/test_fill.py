"""`fill` never makes a step longer or a rank fuller, and `least_time` is below every order."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_dualpipe.schedule import (
    NAMES,
    Backward,
    Costs,
    Forward,
    Memory,
    Overlap,
    Part,
    Placement,
    Schedule,
    build,
    fill,
    least_time,
    members,
    simulate,
    validate,
)
from tests.support.schedules import costs, sizes

MANY = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def per_stage(draw, stages):
    """Uneven costs, of which a pair saves something on each stage."""
    f, i, w = (draw(st.lists(st.integers(2, 9), min_size=stages, max_size=stages)) for _ in range(3))
    b = [x + y for x, y in zip(i, w, strict=True)]
    saved = draw(st.integers(0, min(min(f), min(i))))
    pair = tuple(x + y - saved for x, y in zip(f, b, strict=True))
    return Costs(tuple(f), tuple(b), tuple(w), pair, comm=draw(st.integers(0, 3)))


@st.composite
def problems(draw, names=NAMES):
    """A schedule, costs, and a memory that holds it."""
    schedule = build(*draw(sizes(names, most_ranks=4)))
    stages = schedule.num_stages
    more = draw(st.lists(st.integers(0, 6), min_size=schedule.num_ranks, max_size=schedule.num_ranks))
    amounts = st.lists(st.integers(1, 5), min_size=stages, max_size=stages)
    own = Memory.of(schedule, draw(amounts), draw(amounts))
    limit = tuple(x + y for x, y in zip(own.limit, more, strict=True))
    return schedule, draw(st.one_of(costs(), per_stage(stages))), Memory(limit, own.activations, own.deferred)


def work(schedule):
    """What each rank computes, with B as I and W."""
    every = (
        [part for action in row for member in members(action) for part in parts(member)] for row in schedule.actions
    )
    return [Counter(row) for row in every]


def parts(member):
    if isinstance(member, Forward) or member.part is not Part.FULL:
        return [member]
    return [replace(member, part=part) for part in (Part.INPUT, Part.WEIGHT)]


# ---- Laws ----


@MANY
@given(problems())
def test_a_filled_schedule_is_valid_fits_is_not_slower_and_stays_if_it_is_filled_again(problem):
    """Scaled costs give the same order."""
    schedule, c, memory = problem
    filled = fill(schedule, c, memory)
    validate(filled)
    assert filled.placement == schedule.placement and work(filled) == work(schedule)
    assert memory.holds(filled)
    assert simulate(filled, c).makespan <= simulate(schedule, c).makespan
    assert Schedule.from_csv(filled.to_csv()) == filled
    pairs = [sum(isinstance(action, Overlap) for row in s.actions for action in row) for s in (schedule, filled)]
    assert pairs[0] <= pairs[1]
    scaled = Costs(*(_times(cost, 4) for cost in (c.F, c.B, c.W, c.FB, c.comm)))
    assert filled == fill(filled, c, memory) == fill(schedule, scaled, memory)


def _times(cost, factor):
    return None if cost is None else tuple(factor * x for x in cost) if isinstance(cost, tuple) else factor * cost


@st.composite
def random_orders(draw):
    """A schedule in which each rank runs any action that is ready, or a pair of two."""
    straight, mirrored = Placement.straight, Placement.mirrored(2)
    kinds = straight(1), straight(3), Placement.interleaved(2, 2), Placement.vee(2), mirrored
    placement = draw(st.sampled_from(kinds))
    count = 2 * draw(st.integers(1, 3))
    left = {
        (rank, kind, stage, m): None
        for m in range(count)
        for stage, rank in enumerate(placement.route_of(m, count))
        for kind in "FIW"
    }
    actions = [[] for _ in range(placement.num_ranks)]

    def ready(kind, stage, m):
        done = lambda *result: not any(key[1:] == result for key in left)  # noqa: E731
        if kind == "F":
            return stage == 0 or done("F", stage - 1, m)
        last = stage == placement.num_stages - 1 or done("I", stage + 1, m)
        return done("I", stage, m) if kind == "W" else done("F", stage, m) and last

    while left:
        choices = [key for key in left if ready(*key[1:])]
        rank, kind, stage, m = draw(st.sampled_from(choices))
        forwards = [key for key in choices if key[:2] == (rank, "F")]
        if kind == "I" and forwards and draw(st.booleans()):
            f = forwards[0]
            actions[rank].append(Overlap(Forward(*f[2:]), Backward(stage, m)))
            del left[f], left[rank, "I", stage, m], left[rank, "W", stage, m]
            continue
        part = {"I": Part.INPUT, "W": Part.WEIGHT}
        actions[rank].append(Forward(stage, m) if kind == "F" else Backward(stage, m, part[kind]))
        del left[rank, kind, stage, m]
    return Schedule("random", placement, count, tuple(map(tuple, actions)))


@settings(MANY, max_examples=80)
@given(st.data())
def test_no_order_is_below_the_bound(data):
    schedule = data.draw(random_orders() if data.draw(st.booleans()) else problems().map(lambda problem: problem[0]))
    c = data.draw(st.one_of(costs(), per_stage(schedule.num_stages)))
    memory = Memory.of(schedule)
    bound = least_time(schedule.placement, schedule.num_micro_batches, c, memory)
    assert least_time(schedule.placement, schedule.num_micro_batches, c) <= bound
    assert bound <= simulate(validate(schedule), c).makespan
    assert bound <= simulate(fill(schedule, c, memory), c).makespan


# ---- Examples ----


@pytest.mark.parametrize(
    "deferred,comm,before,after", [(1, 0, 578, 560), (2, 0, 578, 560), (3, 0, 578, 578), (1, 20, 760, 728)]
)
def test_dualpipes_weight_gradients_fill_its_waits(deferred, comm, before, after):
    """Units of a tenth of DeepSeek's attention: short F, and B of which half is W.

    deferred: what a deferred weight gradient needs, in activations. With recomputation it may be three of them.
    """
    schedule, c = build("dualpipe", 4, 8), Costs(F=24, B=46, W=16, FB=59, comm=comm)
    filled = fill(schedule, c, Memory.of(schedule, deferred=(deferred,) * 4))
    assert (simulate(schedule, c).makespan, simulate(filled, c).makespan) == (before, after)
    assert least_time(schedule.placement, 8, replace(c, comm=0), Memory.of(schedule)) == 546


# ---- Refusals ----


def test_what_does_not_fit_is_refused():
    schedule, ones = build("1f1b", 2, 4), (1, 1)
    with pytest.raises(ValueError, match=r"^1f1b does not fit: it needs \[2, 1\] on its ranks, and may use \[1, 1\]$"):
        fill(schedule, Costs(), Memory((1, 1), ones, ones))
    with pytest.raises(ValueError, match=r"^memory needs 2 limits and 2 sizes of stages: got \(3, 2, 2\)$"):
        least_time(schedule.placement, 4, Costs(), Memory((1, 1, 1), ones, ones))
    with pytest.raises(ValueError, match="cost F has 3 numbers for 2 stages"):
        fill(schedule, Costs(F=(1,) * 3, B=4))
