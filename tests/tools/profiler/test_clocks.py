"""Ranks that meet only their neighbors are put on one clock, wherever their recordings start."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.tools.profiler.matching import RankTransfers
from moe_dualpipe.tools.profiler.ranks import compare_traces
from moe_dualpipe.tools.profiler.trace import Collective, DeviceEvent

CHAIN = (0, 1), (1, 2), (2, 3)
times = st.lists(st.integers(-9_000, 9_000), min_size=4, max_size=4)


@settings(max_examples=25, deadline=None)
@given(times, times, st.sampled_from([0.0, 30e-6]))
def test_a_chain_of_ranks_is_on_one_clock(offsets, starts, drift):
    """Rank r's clock is `offsets[r]` us ahead and `r * drift` too fast; its first event starts at `starts[r]`."""
    work: list[list[DeviceEvent]] = [[], [], [], []]

    def seen(rank, time):
        return (time + offsets[rank]) * (1 + rank * drift)

    for step in range(40):
        for group, pair in enumerate(CHAIN):
            end = 10_000 + 5_000 * step + 900 * group
            met = Collective("allreduce", str(group), "", pair, 2, 8, 8, "Float", step)
            for rank in pair:
                times = seen(rank, end - 100 - 7 * rank), seen(rank, end)
                work[rank].append(DeviceEvent("ncclAllReduce", "kernel", *times, "0", "9", None, 1, 0, met))
    ranks = [RankTransfers(own, seen(r, starts[r]), host=f"h{r}", rank=r, world_size=4) for r, own in enumerate(work)]
    for rank, clock in enumerate(compare_traces(ranks).clocks):
        for time in (10_000, 150_000):
            own = seen(rank, time) - seen(rank, starts[rank])
            assert clock.at(own) == pytest.approx(time - starts[0], abs=0.2)
            assert clock.since(clock.at(own)) == pytest.approx(own)
        assert clock.root == 0
