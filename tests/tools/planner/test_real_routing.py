"""Assumed routing: the fullest rank of an expert group, by hand and between its bounds."""

import itertools
import statistics

import pytest

from moe_dualpipe.tools.planner.real_routing import load_factor


def test_with_one_rank_or_even_loads_nobody_is_fuller():
    assert load_factor(64, 8, 1) == load_factor(0, 0, 8) == 1.0
    assert load_factor(64, 8, 16, exponent=0.0) == 1.0


@pytest.mark.parametrize("exponent", [0.1, 1.0])
def test_the_mean_over_placements_is_that_of_all_placements(exponent):
    """Four experts on two ranks: the fullest has two of them, and each of three ways to pair them is as likely."""
    loads = [1 / place**exponent for place in range(1, 5)]
    pairs = [sum(loads[i] for i in pair) for pair in itertools.combinations(range(4), 2)]
    expected = statistics.fmean(max(pair, sum(loads) - pair) for pair in pairs) / (sum(loads) / 2)
    assert load_factor(4, 1, 2, exponent) == pytest.approx(expected, rel=0.03) and expected > 1


def test_a_token_chooses_an_expert_at_most_once():
    """With a steep law, 2 of 4 experts get every token: of one expert on each rank, the fullest has twice the mean."""
    assert load_factor(4, 2, 4, exponent=3.0) == 2.0
    assert load_factor(4, 1, 4, exponent=9.0) == pytest.approx(4.0, rel=0.01)


def test_more_ranks_and_steeper_laws_are_less_even():
    factors = [load_factor(64, 4, ranks) for ranks in (2, 8, 32)]
    assert factors == sorted(factors) and factors[0] > 1 and factors[-1] < 64 / 4
    assert load_factor(64, 4, 8, 0.1) < load_factor(64, 4, 8, 0.3) < load_factor(64, 4, 8, 0.6)
