"""The division of a step over other numbers of processes: the nearest to the one asked for, with the same batches."""

import dataclasses
import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from moe_dualpipe.training.division import Division, Limits, NoDivisionError, choose_division, fitting_numbers, problem

from moe_dualpipe.models import ModelConfig, split
from moe_dualpipe.runtime.layout import divisors
from moe_dualpipe.schedule import NAMES, build, default_schedule

LIMITS = Limits(layers=8, experts=12)
ASKED = Division("dualpipe", pp=2, dp=4, ep=2, micro_batches=12, chosen_schedule=False)


@st.composite
def divisions_asked_for(draw):
    """A valid division, and the limits of its model."""
    pp, dp = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    limits = Limits(draw(st.integers(1, 14)), draw(st.sampled_from([1, 2, 6, 8, 12])))
    name = draw(st.sampled_from([*NAMES, "auto"]))
    schedule = default_schedule(pp) if name == "auto" else name
    ep = draw(st.sampled_from(divisors(math.gcd(dp, limits.experts))))
    asked = Division(schedule, pp, dp, ep, draw(st.integers(1, 24)), chosen_schedule=name != "auto")
    assume(not problem(asked, limits))
    return asked, limits


def runs(division, limits):
    """Whether the run itself accepts the division."""
    model = ModelConfig(num_layers=limits.layers, num_experts=limits.experts, experts_per_token=1, num_dense_layers=0)
    try:
        schedule = build(division.schedule, division.pp, division.micro_batches, division.num_chunks)
        split(model, schedule.num_stages)
    except ValueError:
        return False
    return limits.experts % division.ep == 0 and division.dp % division.ep == 0


@settings(max_examples=80, deadline=None)
@given(divisions_asked_for(), st.integers(1, 24))
def test_a_division_keeps_the_batch_is_valid_and_the_nearest(asked_and_limits, processes):
    asked, limits = asked_and_limits

    def distance(pp, ep):
        return math.prod(Fraction(max(a, b), min(a, b)) for a, b in ((asked.pp, pp), (asked.ep, ep)))

    names = ["dualpipev", "1f1b", *([asked.schedule] if asked.chosen_schedule else ["dualpipe"])]
    valid = [
        division
        for pp, name, ep in itertools.product(divisors(processes), names, divisors(limits.experts))
        if not asked.total_micro_batches % (processes // pp)
        for division in [Division(name, pp, processes // pp, ep, asked.total_micro_batches * pp // processes)]
        if runs(division, limits)
    ]
    try:
        chosen, why = choose_division(asked, processes, limits)
    except NoDivisionError as error:
        assert not valid
        for number in fitting_numbers(asked, processes, limits):
            assert choose_division(asked, number, limits) and str(number) in str(error)
        return
    assert chosen.processes == processes and chosen.total_micro_batches == asked.total_micro_batches
    assert runs(chosen, limits)
    assert distance(chosen.pp, chosen.ep) == min(distance(d.pp, d.ep) for d in valid)
    if processes == asked.processes:
        assert (chosen, why) == (asked, "")
    if not why and asked.chosen_schedule:
        assert chosen == dataclasses.replace(asked, dp=chosen.dp, micro_batches=chosen.micro_batches)


@pytest.mark.parametrize("processes,schedule,pp,dp,ep,micro_batches,why", [
    (8, "dualpipe", 2, 4, 2, 12, ""),
    (4, "dualpipe", 2, 2, 2, 24, ""),  # fewer data-parallel ranks, with more micro-batches each
    (16, "dualpipe", 2, 8, 2, 6, ""),
    (12, "dualpipe", 2, 6, 2, 8, ""),
    (6, "dualpipe", 2, 3, 3, 16, "--ep 2 does not divide 12 experts and 3 data-parallel ranks"),
    (2, "dualpipe", 2, 1, 1, 48, "--ep 2 does not divide 12 experts and 1 data-parallel ranks"),
    (3, "dualpipev", 1, 3, 3, 16, "--pp 2 does not divide 3 processes"),
    (9, "dualpipev", 3, 3, 3, 16, "--pp 2 does not divide 9 processes"),
    (32, "1f1b", 2, 16, 2, 3, "dualpipe needs an even number of micro-batches >= 2 x ranks: got 3"),
], ids=str)  # fmt: skip
def test_examples(processes, schedule, pp, dp, ep, micro_batches, why):
    found, reason = choose_division(ASKED, processes, LIMITS)
    assert (found.schedule, found.pp, found.dp, found.ep, found.micro_batches) == (schedule, pp, dp, ep, micro_batches)
    assert reason.startswith(why) and bool(reason) == bool(why)


def test_a_schedule_that_was_named_is_kept_where_it_can():
    asked = Division("zbv", 2, 4, 1, 12)
    assert [choose_division(asked, n, LIMITS)[0].schedule for n in (3, 4, 8, 16)] == ["zbv"] * 4
    interleaved = Division("interleaved_1f1b", 2, 2, 1, 12, num_chunks=3)
    kept, other = (choose_division(interleaved, n, Limits(layers, 8))[0] for n, layers in ((2, 6), (4, 6)))
    assert (kept.schedule, kept.num_chunks) == ("interleaved_1f1b", 3) and other == interleaved
    changed, _ = choose_division(interleaved, 3, Limits(6, 8))  # 3 x 3 stages do not fit
    assert (changed.schedule, changed.num_chunks, changed.pp) == ("dualpipev", None, 3)


def test_memory_decides_between_divisions_but_not_on_the_one_asked_for():
    tried = []

    def too_large(division):
        tried.append(division)
        return "" if division.pp >= 4 else f"{division.pp} needs more"

    assert choose_division(ASKED, 8, LIMITS, too_large) == (ASKED, "") and not tried
    found, why = choose_division(ASKED, 4, LIMITS, too_large)
    assert (found.pp, found.dp, found.micro_batches, why) == (4, 1, 48, "2 needs more")
    assert tried[0] == dataclasses.replace(ASKED, dp=2, micro_batches=24)
    with pytest.raises(NoDivisionError) as error:
        choose_division(ASKED, 2, LIMITS, too_large)
    assert str(error.value) == "2 needs more, and no other division of 48 micro-batches over 2 processes needs less"


def test_the_error_names_numbers_of_processes_that_would_do():
    with pytest.raises(NoDivisionError) as error:
        choose_division(ASKED, 5, Limits(4, 12))
    assert str(error.value) == (
        "no schedule can divide 48 micro-batches over 5 processes: use 2, 3, 4, 6, 8, 9 processes "
        "(--pp 2 does not divide 5 processes)"
    )


def test_in_words():
    assert str(ASKED) == ("dualpipe over 2 pipeline x 4 data-parallel ranks, experts over 2, 12 micro-batches each")
    assert str(Division("1f1b", 1, 1, 1, 1)) == "1f1b over 1 pipeline x 1 data-parallel ranks, 1 micro-batch each"
