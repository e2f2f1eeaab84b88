"""Minimum times of dispatch and combine from data sheets, against counts by hand and published rates."""

import itertools
import re

import pytest

from benchmarks.gpu.transfer_roofline import SETTINGS, Gpu, Setting

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
