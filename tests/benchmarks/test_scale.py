"""A run of thousands of ranks: nothing that a rank does grows faster than their number."""

import pytest

from benchmarks.scale import measured


@pytest.mark.long
def test_a_rank_of_a_group_that_connects_when_used_reads_only_the_addresses_of_its_neighbors():
    neighbors, everyone = (measured("--one-group", 24, TORCH_GLOO_LAZY_INIT=lazy)["operations"] for lazy in "10")
    assert neighbors <= 6 and everyone > 2 * 24


@pytest.mark.long
def test_start_and_steps_of_a_rank():
    small, large = (measured("--one-world", ranks) for ranks in (64, 1024))
    assert small["member"] == large["member"]  # the groups that this rank joins
    assert large["calls"] <= 16 * small["calls"]
    assert large["memory"] <= 2 * small["memory"]
