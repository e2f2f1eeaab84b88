"""The machine that makes traces with known faults: its clock, against times worked out by hand."""

import pytest

from moe_dualpipe.tools.profiler import analyze, read_trace
from tests.support.faults import FAULTS, run, write_traces
from tests.support.faults.jobs import HEALTHY
from tests.support.faults.program import Await, Collective, Graph, Item, Job, Kernel, Machine, Python, Record

PLAIN = Machine(
    call_us=0, launch_us=2, latency_us=3, gap_us=0, slower_beside_transfers=0.5, slower_beside_computation=1
)  # fmt: skip


def spans(*programs, machine=PLAIN):
    """Start and end of each device event, by rank and name; transfers by their key."""
    groups = {"ep": (tuple(range(len(programs))),)}
    recording = run(Job(dict(enumerate(programs)), machine, groups))
    return {
        (rank, span.op.name if isinstance(span.op, Kernel) else span.op.key): (span.start, span.end)
        for rank, found in recording.ranks.items() for span in found.device
    }  # fmt: skip


def transfer(key, us, after, ranks=(0,), stream="ep"):
    return Collective(key, "all_reduce", "ep", ranks, us, 1, stream, after)


def test_a_stream_runs_in_order_and_a_host_ahead_costs_nothing():
    found = spans((Kernel("a", 10), Kernel("b", 20), Kernel("c", 5, "other")))
    assert found == {(0, "a"): (5, 20), (0, "b"): (20, 40), (0, "c"): (9, 19)}  # a and c share the device


def test_a_slow_host_delays_each_kernel():
    found = spans((Kernel("a", 1), Python(30), Kernel("b", 1)))
    assert found[0, "b"] == (2 + 30 + 2 + 3, 38)


def test_an_item_holds_the_host_until_its_stream_is_done():
    found = spans((Kernel("a", 100), Item(), Kernel("b", 1)))
    copied = 5 + 100 + 2
    assert found[0, "b"] == (copied + 2 + 2 + 3, copied + 8)


def test_an_event_orders_two_streams():
    found = spans((Kernel("a", 50), Record("a"), Await("a", "other"), Kernel("b", 1, "other")))
    assert found[0, "b"] == (55, 56)


def test_a_transfer_moves_data_when_all_have_joined_and_slows_computation():
    """Rank 1 joins at 105. Until then rank 0's transfer waits, and its own kernel takes 1.5 times as long."""
    first = Record("go"), transfer("t", 10, "go", (0, 1)), Kernel("a", 60)
    found = spans(first, (Kernel("slow", 100), Record("go"), transfer("t", 10, "go", (0, 1))))
    assert found[1, "slow"] == (5, 105)
    assert found[0, "t"] == (1 + 1 + 2 + 3, 115)
    assert found[1, "t"] == (105, 115)
    assert found[0, "a"] == (10, 10 + 1.5 * 60)


def test_what_shares_a_queue_waits_for_what_was_launched_before():
    program = Kernel("a", 50), Kernel("b", 50), Kernel("c", 1, "other"), Kernel("d", 1, "other")
    assert spans(program)[0, "c"][0] < 55
    alone = spans(program, machine=Machine(0, 2, 3, 1, 0, 0, gap_us=0))
    assert alone[0, "b"][0] == alone[0, "c"][0] == 55  # c may start when b has started


def test_a_graph_is_one_launch():
    found = spans((Graph((Kernel("a", 5), Kernel("b", 5))),))
    assert found == {(0, "a"): (7, 12), (0, "b"): (12, 17)}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_jobs_hide_their_communication_and_their_hosts_are_ahead(name, tmp_path):
    recording = run(HEALTHY[name](seed=1))
    for path in write_traces(recording, tmp_path):
        trace = read_trace(path)
        (analysis,) = analyze(trace)
        rank = recording.ranks[trace.rank]
        assert analysis.window_us == pytest.approx(rank.window_us, abs=0.01)
        assert analysis.exposed_comm_us < 0.015 * analysis.window_us
        assert max(span.end for span in rank.host) < 0.5 * rank.window_us
        for event in trace.device_events:
            assert trace.launches[event.correlation].end < event.start


@pytest.mark.parametrize("name", [fault.name for fault in FAULTS.values() if fault.mended])
def test_every_fault_costs_time_and_a_stronger_one_more(name):
    fault = FAULTS[name]
    job, mended = fault.healthy(), fault.mended
    assert mended is not None
    costs = [run(fault.apply(job, n)).window_us - run(mended(job, n)).window_us for n in (1, 2)]
    assert 0.01 * run(job).window_us < costs[0] < 0.9 * costs[1]


@pytest.mark.parametrize("name", ["moe", "data parallel"])
def test_more_ranks_meet_in_their_groups(name):
    recording = run(HEALTHY[name](ranks=4))
    ends = {}
    for found in recording.ranks.values():
        for span in found.device:
            if isinstance(span.op, Collective):
                ends.setdefault(span.op.key, []).append(span.end)
    assert all(len(set(same)) == 1 for same in ends.values())
