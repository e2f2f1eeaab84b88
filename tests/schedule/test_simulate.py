"""Simulated times equal the published formulas, or exact ones where those do not hold, and obey general laws. So does
`compare`, which simulates all schedules for one model."""

import json
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moe_dualpipe.schedule import (
    Backward,
    Costs,
    Forward,
    Overlap,
    Part,
    Span,
    Timeline,
    build,
    members,
    simulate,
)
from moe_dualpipe.schedule.compare import compare
from tests.support.schedules import costs, sizes, small

MANY = settings(max_examples=40, deadline=None)


def parts(c):
    """F, I, W and FB of costs with one number for all stages."""
    return c.F, c.B - c.W, c.W, c.FB


# ---- Published formulas ----


@MANY
@given(sizes(["gpipe", "1f1b", "interleaved_1f1b"]), costs())
def test_bubble_of_gpipe_and_1f1b(size, c):
    name, ranks, micro_batches = size
    chunks = 3 if name == "interleaved_1f1b" else None
    timeline = simulate(build(name, ranks, micro_batches, chunks), c)
    assert timeline.bubble == ((ranks - 1) * (c.F + c.B),) * ranks


@MANY
@given(sizes(["zb1p"]), costs())
def test_bubble_of_zb1p(size, c):
    _, ranks, micro_batches = size
    F, I, W, _ = parts(c)
    timeline = simulate(build("zb1p", ranks, micro_batches), c)
    assert timeline.bubble == ((ranks - 1) * max(F, I, F + I - W),) * ranks
    if min(F, I) >= W:
        assert timeline.bubble[0] == (ranks - 1) * (c.F + c.B - 2 * W)  # as published


@MANY
@given(sizes(["dualpipe", "dualpipev"]), costs())
def test_bubble_of_dualpipe(size, c):
    """The published bubble, (PP/2 - 1)(FB + B - 3W), is exact at the fold if B = F + W and W <= F.

    The bubble is shorter if I > F, because one forward hides in it, and longer if I < F or W > I. Outer ranks run fewer
    pairs. If FB < F + B, they therefore compute longer and have a shorter bubble.
    """
    name, ranks, micro_batches = size
    F, I, W, FB = parts(c)
    timeline = simulate(build(name, ranks, micro_batches), c)
    depth = ranks if name == "dualpipev" else ranks // 2
    others = depth - 1
    published = others * (FB + c.B - 3 * W)
    at_fold = published + others * (max(0, F - I) + max(0, W - I)) - min(others * max(0, I - F), F)
    expected = [at_fold - max(0, depth - 2 - d) * (F + c.B - FB) for d in range(depth)]
    if name == "dualpipe":
        expected += expected[::-1]
    assert list(timeline.bubble) == expected
    if I == F and W <= F:
        assert timeline.bubble[depth - 1] == published
    assert (at_fold < published) == (others > 0 and I > F and others * max(0, W - I) < min(others * (I - F), F))


# ---- Memory ----


@MANY
@given(sizes())
def test_peak_activations_equal_the_papers(size):
    name, p, m = size
    timeline = simulate(build(*size), Costs())
    full = 2 * p - 1 <= m
    expected = {
        "gpipe": [m] * p,
        "1f1b": [p - r for r in range(p)],
        "interleaved_1f1b": [min(2 * m, p + 2 * (p - 1 - r) + 1) for r in range(p)],
        "1f1b_overlap": [min(m, 2 * (p - r)) for r in range(p)],
        "interleaved_overlap": [min(2 * m, p + 2 * (p - r)) for r in range(p)],
        "zb1p": [p - r for r in range(p)],
        "zbv": [2 * p] * p if full else None,
        "dualpipe": [p + 1] * p,
        "dualpipev": [2 * p + 1] * p,
        "chimera": [min(m // 2, p // 2 + min(r, p - 1 - r) + 1) for r in range(p)] if m >= 2 * p else None,
    }[name]
    if expected is not None:
        assert list(timeline.peak_activations) == expected
    assert timeline.parameters == ((1 if name in ("gpipe", "1f1b", "1f1b_overlap", "zb1p") else 2),) * p


@MANY
@given(sizes(["zb1p", "zbv", "dualpipe", "dualpipev"]))
def test_peak_deferred_weight_gradients(size):
    name, p, m = size
    assume(m >= 2 * p - 1)
    most = {"zb1p": p, "zbv": 2 * p - 1, "dualpipe": p // 2, "dualpipev": p}[name]
    assert max(simulate(build(*size), Costs(2, 5, 2, 7)).peak_deferred) == most


def test_peak_bytes_count_each_stage_with_its_own_size():
    timeline = simulate(build("dualpipev", 1, 2), Costs(2, 5, 3, 6))
    assert timeline.schedule.to_csv() == "0F0,1F0,0F1,1B0,(1F1;0B0)OVERLAP_F_B,1B1,0I1,0W1\n"
    held = timeline.held(0, activations=[1, 10], deferred=[100, 1000])
    assert [(h.time, h.activations, h.deferred) for h in held] == [
        (0, 1, 0), (2, 11, 0), (4, 12, 0), (11, 2, 0), (11, 12, 0), (17, 11, 0), (22, 1, 0), (24, 0, 100), (27, 0, 0),
    ]  # fmt: skip
    assert [timeline.peak_bytes([1, 10], deferred) for deferred in ([100, 1000], [5, 50])] == [(100,), (12,)]


# ---- General laws ----


@settings(max_examples=60, deadline=None)
@given(sizes(most_ranks=4), costs(), st.integers(0, 3), st.data())
def test_times_equal_a_tick_by_tick_simulation(size, c, comm, data):
    """In the reference, each idle rank starts its next action at the first tick at which all inputs have arrived."""
    schedule = build(*size)
    per_stage = st.lists(small, min_size=schedule.num_stages, max_size=schedule.num_stages).map(tuple)
    f, i, w = (data.draw(per_stage) for _ in range(3))
    b = tuple(map(sum, zip(i, w, strict=True)))
    half = data.draw(st.integers(0, (min(f) + min(b) - 1) // 2))  # of what a pair of stage 0 saves: times stay integers
    fb = (f[0] + b[0] - 2 * half, *(f[s] + b[s] for s in range(1, len(f))))
    c = data.draw(st.sampled_from([c, Costs(f, b, w, fb)]))
    c = replace(c, comm=comm)
    timeline = simulate(schedule, c)

    results, busy, position = {}, [0] * schedule.num_ranks, [0] * schedule.num_ranks
    got = [[] for _ in schedule.actions]
    tick = 0
    while any(p < len(actions) for p, actions in zip(position, schedule.actions, strict=True)) or max(busy) > tick:
        assert tick <= timeline.makespan
        for rank, actions in enumerate(schedule.actions):
            if position[rank] == len(actions) or busy[rank] > tick:
                continue
            action = actions[position[rank]]
            if all(arrival(results, member, rank, schedule, comm) <= tick for member in members(action)):
                busy[rank] = tick + c.of(action)
                got[rank].append(Span(action, tick, busy[rank]))
                position[rank] += 1
                for member in members(action):
                    if not isinstance(member, Backward) or member.part is not Part.WEIGHT:
                        results[type(member), member.stage, member.micro_batch] = busy[rank], rank
                    results[member] = busy[rank], rank
        tick += 1
    assert timeline.spans == tuple(map(tuple, got))
    assert all(type(time) is int for spans in timeline.spans for span in spans for time in (span.start, span.end))
    busy = [sum(span.end - span.start for span in spans) for spans in got]
    assert timeline.bubble == tuple(timeline.makespan - time for time in busy) and timeline.makespan == tick
    assert timeline.bubble_share == pytest.approx(1 - sum(busy) / (tick * len(busy)))


def arrival(results, member, rank, schedule, comm):
    def known(key):
        end, where = results.get(key, (float("inf"), rank))
        return end + (comm if where != rank else 0)

    m = member.micro_batch
    if isinstance(member, Forward):
        return known((Forward, member.stage - 1, m)) if member.stage else 0
    if member.part is Part.WEIGHT:
        return known(Backward(member.stage, m, Part.INPUT))
    after = known((Backward, member.stage + 1, m)) if member.stage + 1 < schedule.num_stages else 0
    return max(known((Forward, member.stage, m)), after)


# ---- Costs ----


def test_costs_of_actions():
    c = Costs(F=(1, 2), B=(5, 7), W=(2, 3), FB=(6, 8))
    f, b = Forward(1, 0), Backward(0, 4)
    assert [c.of(a) for a in (f, b, Backward(0, 1, Part.INPUT), Backward(1, 1, Part.WEIGHT))] == [2, 5, 3, 3]
    assert c.of(Overlap(f, b)) == 2 + 5 - (0 + 1) / 2  # stage 0 saves nothing with itself, stage 1 saves 1
    assert Costs(F=(1, 2), B=(5, 7)).of(Overlap(f, b)) == 2 + 5
    assert [Costs(F=1, B=B).of(Backward(0, 0, Part.WEIGHT)) for B in (4, 5)] == [2, 2.5]


# ---- Refusals ----

ONE = build("1f1b", 1, 1)
FIRST, LAST = ONE.actions[0]
PER_STAGE = Costs(F=(1, 2, 3, 4))


def timeline(*times):
    return Timeline(ONE, (tuple(Span(action, *time) for action, time in zip(ONE.actions[0], times, strict=True)),))


REFUSED = {
    "cost F must be a finite number greater than 0: got 0; use 1": lambda: Costs(F=0),
    "cost B must be a finite number greater than 0: got -3; use 1": lambda: Costs(B=(2, -3)),
    "cost FB must be a finite number greater than 0: got nan; use 1": lambda: Costs(FB=float("nan")),
    "cost comm must be a finite number at least 0: got -1; use 0": lambda: Costs(comm=-1),
    "cost F is empty: give one number, or one per stage": lambda: Costs(F=()),
    "cost W is part of B and must be smaller: got W=3 and B=3; use W=1.5, or a larger B": lambda: Costs(
        B=(4, 3), W=(2, 3)
    ),
    "per-stage costs must have the same length: got 2 for F, 3 for B": lambda: Costs(F=(1, 2), B=(2, 2, 2)),
    "cost F has 4 numbers for 8 stages: give 1 or 8": lambda: simulate(build("1f1b", 8, 8), PER_STAGE),
    "cost FB is too small: a forward on stage 0 and a backward on stage 1 would take -2; use a larger FB": lambda: (
        Costs(F=(1, 9), B=5, FB=(2, 2))
    ),
    "4 stages cannot be merged or split evenly into 6": lambda: PER_STAGE.divided(4, 6),
    "0B0 on rank 0 starts at 1, but the rank is busy until 2": lambda: timeline((0, 2), (1, 3)),
    "0F0 on rank 0 starts at 0 but ends at -1": lambda: timeline((0, -1), (1, 3)),
    "spans for 0 ranks, but 1f1b has 1": lambda: Timeline(ONE, ()),
    "the spans of rank 0 are not its actions in 1f1b": lambda: Timeline(ONE, ((Span(LAST, 0, 1), Span(FIRST, 1, 2)),)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_costs_and_spans_that_cannot_be_are_refused(message):
    with pytest.raises(ValueError) as error:
        REFUSED[message]()
    assert str(error.value) == message


COSTS = Costs(F=2, B=5, W=2, FB=6)


def test_memory_is_counted_in_stages_of_the_model():
    found = {(e.name, e.num_ranks): e.as_object() for e in compare(8, 32, COSTS)}
    assert max(found["dualpipev", 8]["peak_activations"]) == 17 / 2
    assert found["dualpipev", 8]["parameters"] == [1] * 8 and found["dualpipe", 4]["parameters"] == [4] * 4
    assert max(found["1f1b", 4]["peak_activations"]) == 4 * 2
    assert found["1f1b", 4]["step_time"] == simulate(build("1f1b", 4, 32), Costs(4, 10, 4)).makespan


def test_per_stage_costs_are_merged_and_split_with_the_stages():
    costs = Costs(F=(1, 1, 1, 5), B=(2, 2, 2, 10))
    for entry in compare(4, 8, costs):
        assert sum(entry.timeline.busy) == 8 * 24
        assert json.dumps(entry.as_object())


@pytest.mark.parametrize(
    "arguments,message",
    [
        ((0, 8, COSTS), "a model has at least one stage: got 0; use 1 or more"),
        ((8, 3, COSTS), "no schedule runs with fewer micro-batches than ranks: got 3 for 4 ranks; use at least 4"),
        ((8, 32, COSTS, 1), "interleaved_1f1b needs at least 2 chunks per rank: got 1; use 2"),
        ((8, 32, Costs(F=(1, 2))), "cost F has 2 numbers for 8 stages: give 1 or 8"),
    ],
)
def test_invalid_numbers_are_refused(arguments, message):
    with pytest.raises(ValueError) as error:
        compare(*arguments)
    assert message in str(error.value)
