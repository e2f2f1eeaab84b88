"""A run of thousands of ranks: nothing that a rank does grows faster than their number."""

import pytest

from benchmarks.scale import measured


@pytest.mark.long
def test_start_and_steps_of_a_rank():
    small, large = (measured(ranks) for ranks in (64, 1024))
    assert small["member"] == large["member"]  # the groups that this rank joins
    assert large["calls"] <= 16 * small["calls"]
    assert large["memory"] <= 2 * small["memory"]
