"""Ranks in several process groups: who meets whom, how long each waited, and on which clock."""

import random
from dataclasses import replace

import pytest

from moe_dualpipe.tools.profiler.matching import RankTransfers
from moe_dualpipe.tools.profiler.ranks import compare_traces
from moe_dualpipe.tools.profiler.trace import Collective
from tests.support.rank_programs import Compute, Join, device_event, execute, rank_transfers


def groups_of(world, *strides):
    """Ranks of a grid: the sizes of its axes, the last one varies fastest. Returns the groups along each axis."""
    found, step = [], 1
    for size in reversed(strides):
        found.append([
            tuple(first + i * step for i in range(size))
            for first in range(world) if first // step % size == 0
        ])  # fmt: skip
        step *= size
    return found[::-1]


def layers(world, axes, kinds, repeats=6, seed=0):
    """Each rank computes for its own random time before it joins its group on each axis in turn."""
    draw = random.Random(seed)
    program = []
    for _ in range(repeats):
        for groups, (kind, name) in zip(axes, kinds, strict=True):
            program.append(Compute({rank: draw.randrange(1, 200) for rank in range(world)}))
            program += [Join(kind, name, ranks, draw.randrange(5, 60)) for ranks in groups]
    return program


TP_DP = layers(4, groups_of(4, 2, 2), [("all_reduce", "dp"), ("all_gather", "tp")])
PP_EP_TP = layers(8, groups_of(8, 2, 2, 2), [("p2p", "pp"), ("all_to_allv", "ep"), ("_reduce_scatter_base", "tp")])
PROGRAMS = pytest.mark.parametrize("program,world", [(TP_DP, 4), (PP_EP_TP, 8)], ids=["tp x dp", "tp x ep x pp"])


def waited(ranks):
    return [skew.waited_us for skew in compare_traces(ranks).skews]


@PROGRAMS
@pytest.mark.parametrize("numbered", [True, False])
def test_ranks_wait_in_each_of_their_groups(program, world, numbered):
    done = execute(program, world, numbered)
    ranks = [rank_transfers(done, rank) for rank in range(world)]
    assert waited(ranks) == [done.waited[rank] for rank in range(world)]
    assert len({*done.waited.values()}) == world  # no two numbers are equal by accident


@PROGRAMS
def test_clocks_are_connected_through_groups(program, world):
    """Rank 0 and the last one share no group. Clocks differ by seconds; each rank is on a host of its own."""
    done = execute(program, world)
    draw = random.Random(1)
    offsets = [draw.uniform(-5e6, 5e6) for _ in range(world)]
    ranks = [rank_transfers(done, rank, offsets[rank], host=f"host{rank}") for rank in range(world)]
    first = [min(event.start for event in done.events[rank]) for rank in range(world)]
    for rank, skew in enumerate(compare_traces(ranks).skews):
        assert skew.shift_us == pytest.approx(first[rank] - first[0], abs=1e-6)
        assert skew.waited_us == pytest.approx(done.waited[rank], abs=1e-4)


def test_clocks_that_drift():
    """20 ppm in 2 s are 40 us. After the alignment, ends of collectives differ by less than 1 us everywhere."""
    program = layers(4, groups_of(4, 2, 2), [("all_reduce", "dp"), ("all_gather", "tp")], repeats=40)
    for item in program:
        if isinstance(item, Compute) and isinstance(item.us, dict):
            item.us.update({rank: us * 200 for rank, us in item.us.items()})
    done = execute(program, 4)
    assert done.end > 1.5e6
    drifts = (0.0, 20e-6, -20e-6, 15e-6)
    ranks = [rank_transfers(done, r, r * 1e6, drifts[r], host=f"host{r}") for r in range(4)]
    compared = compare_traces(ranks)
    for meeting in compared.meetings:
        ends = [compared.clocks[m].at(e.end - ranks[m].start_us)
                for m, e in zip(meeting.members, meeting.events, strict=True)]  # fmt: skip
        assert max(ends) - min(ends) < 1
    assert [clock.drift for clock in compared.clocks] == pytest.approx([-d for d in drifts], abs=1e-6)


@PROGRAMS
def test_the_same_groups_without_names_of_ranks(program, world):
    """Groups are listed at the beginning of the file."""
    done = execute(program, world)
    listed = {}
    for item in program:
        if isinstance(item, Join):
            listed.setdefault(item.ranks, f"{len(listed)}")

    def without(event):
        group = listed[event.collective.ranks]
        return event._replace(collective=event.collective._replace(group=group, ranks=()))

    ranks = [rank_transfers(done, rank) for rank in range(world)]
    ranks = [replace(rank, transfers=[*map(without, rank.transfers)], groups={n: g for g, n in listed.items()})
             for rank in ranks]  # fmt: skip
    assert waited(ranks) == [done.waited[rank] for rank in range(world)]


def test_two_groups_of_one_name_without_ranks_are_not_mixed():
    """Both pairs of a 2 x 2 grid call their group "tp". Nothing tells which ranks are in which."""
    done = execute(TP_DP, 4, with_ranks=False)
    compared = compare_traces([rank_transfers(done, rank) for rank in range(4)])
    assert not compared.meetings
    assert compared.problems == [f"{name}: 4 ranks recorded this group of 2 ranks" for name in ("dp", "tp")]
    pair = compare_traces([rank_transfers(done, rank) for rank in (0, 1)])  # the trace of no other rank is here
    assert [meeting.group.name for meeting in pair.meetings].count("tp") == 6


def test_missing_ranks():
    """The others are compared among themselves; a rank alone in its groups waited for an unknown time."""
    done = execute(TP_DP, 4)
    ranks = [replace(rank_transfers(done, r), world_size=4) for r in (0, 1)]
    compared = compare_traces(ranks)
    assert compared.missing == [2, 3]
    assert [(m.members, m.group.ranks) for m in compared.meetings] == [((0, 1), (0, 1))] * 6
    diagonal = compare_traces([replace(rank_transfers(done, r), world_size=4) for r in (0, 3)])
    assert [skew.waited_us for skew in diagonal.skews] == [None, None]
    assert diagonal.missing == [1, 2]
    three = compare_traces([replace(rank_transfers(done, r), world_size=4) for r in (0, 1, 3)])
    assert {m.group.ranks for m in three.meetings} == {(0, 1), (1, 3)}
    assert three.missing == [2] and None not in [skew.waited_us for skew in three.skews]
    unknown = compare_traces([rank_transfers(done, rank) for rank in (0, 1)])
    assert unknown.missing == []


def test_recordings_that_begin_at_different_collectives():
    """Sequence numbers tell which collectives are the same."""
    done = execute(TP_DP, 4)
    late = {0: 0, 1: 3, 2: 5, 3: 1}
    cut = [replace(rank_transfers(done, r), transfers=rank_transfers(done, r).transfers[late[r] :]) for r in range(4)]
    compared = compare_traces(cut)
    whole = compare_traces([rank_transfers(done, rank) for rank in range(4)])
    same = [m for m in whole.meetings if all(e in cut[i].transfers for i, e in zip(m.members, m.events, strict=True))]
    assert sorted(m.events for m in compared.meetings) == sorted(m.events for m in same)
    assert 0 < len(same) < len(whole.meetings)
    assert not compared.problems


@pytest.mark.parametrize("hosts", [True, False])
@pytest.mark.parametrize("cut", [slice(1, None), slice(3, None), slice(None, -1), slice(None, -4)], ids=str)
def test_unequal_counts_without_numbers_are_compared_in_order(cut, hosts):
    """The first or the last collectives of one rank are missing: the others are those that numbers would have told."""
    done = execute(TP_DP, 4, numbered=False)
    whole = [rank_transfers(done, rank, host="a" if hosts else f"{rank}") for rank in range(4)]
    tp = [event for event in whole[0].transfers if event.collective.group == "tp"]
    kept = [event for event in whole[0].transfers if event.collective.group == "dp" or event in tp[cut]]
    compared = compare_traces([replace(whole[0], transfers=kept), *whole[1:]])
    assert compared.problems == [
        f"tp of ranks 0, 1: rank 0 and rank 1 recorded different collectives, without numbers "
        f"({len(tp[cut])} of them are compared in their order)"
    ]
    same = [m.events for m in compare_traces(whole).meetings if 0 not in m.members or m.events[0] in kept]
    assert sorted(m.events for m in compared.meetings) == sorted(same)


def test_a_send_meets_its_receive():
    """The peer is a global rank. Rank 3 of the group of ranks 0 and 3 is not its fourth rank."""
    program = [
        Compute({0: 30, 3: 5}),
        Join("p2p", "pp", (0, 3), 10),
        Compute({0: 5, 3: 50}),
        Join("p2p", "pp", (3, 0), 4),
    ]
    done = execute(program, 4)
    ranks = [rank_transfers(done, rank) for rank in (0, 3)]
    assert waited(ranks) == [done.waited[0], done.waited[3]] == [45, 25]
    outside = [replace(rank, transfers=[e._replace(collective=e.collective._replace(peer=1)) for e in rank.transfers])
               for rank in ranks]  # fmt: skip
    assert waited(outside) == [None, None]
    unknown = [replace(rank, rank=None) for rank in ranks]
    assert waited(unknown) == [None, None]


def test_a_meeting_is_complete_with_all_ranks_of_its_group():
    done = execute([Join("all_reduce", "dp", (0, 1, 2)), Join("p2p", "pp", (0, 1))], 3)
    three, two = (compare_traces([rank_transfers(done, rank) for rank in range(n)]) for n in (3, 2))
    assert [meeting.complete for meeting in three.meetings] == [True, True]
    assert [meeting.complete for meeting in two.meetings] == [False, True]


def test_numbers_of_sends_differ_between_ranks():
    """Rank 1 receives from rank 0 and sends to rank 2. Its number of the send is 1, that of rank 2's receive is 0."""
    program = [Compute({0: 30, 1: 5, 2: 7})]
    for _ in range(4):
        program += [Join("p2p", "pp", (0, 1), 10), Compute({1: 20}), Join("p2p", "pp", (1, 2), 10)]
    done = execute(program, 3, numbered=False)
    ranks = []
    for rank in range(3):
        own = rank_transfers(done, rank)
        numbered = [e._replace(collective=e.collective._replace(sequence=n)) for n, e in enumerate(own.transfers)]
        ranks.append(replace(own, transfers=numbered))
    assert waited(ranks) == [done.waited[rank] for rank in range(3)]
    assert [len(joined) for joined in compare_traces(ranks).joined] == [4, 8, 4]
    fewer = compare_traces([*ranks[:2], replace(ranks[2], transfers=ranks[2].transfers[1:])])
    assert fewer.problems == [
        "1 -> 2: rank 1 and rank 2 recorded different collectives, without numbers (3 of them are compared in their "
        "order)"
    ]


def test_ranks_without_a_connection_to_the_first_are_checked_too():
    """Ranks 2 and 3 meet in their own group only. Their traces are of different runs."""
    done = execute([Compute({0: 7, 2: 3}), *(Join("all_reduce", "tp", ranks, 10) for ranks in ((0, 1), (2, 3)))] * 5, 4)
    ranks = [rank_transfers(done, rank, host="" if rank < 2 else "b") for rank in range(4)]
    known = compare_traces(ranks)
    assert [clock.root for clock in known.clocks] == [0, 0, 2, 2]
    assert [skew.shift_us is None for skew in known.skews] == [False, False, True, True]
    assert not known.problems and None not in waited(ranks)
    ranks[3] = replace(ranks[3], base_us=1e6)  # a second later on the clock of the same host
    assert compare_traces(ranks).problems == [
        "tp of ranks 2, 3: collectives that should be the same do not overlap in time"
    ]
    assert waited(ranks)[2:] == [None, None]


def test_noise_and_jumps_are_no_drift():
    """Of 30 ends, the last third is 8 ms later on the other clock, or all are 50 us later, give or take 20."""

    def rank(ends):
        numbered = [Collective("allreduce", "dp", "", (0, 1), 2, sequence=k) for k in range(30)]
        events = [device_event("nccl", end - 9_000, end, "20", one) for end, one in zip(ends, numbered, strict=True)]
        return RankTransfers(events, 0.0)

    own = [10_000.0 * k + 9_000 for k in range(30)]
    jump = [end + 8_000 * (k >= 20) for k, end in enumerate(own)]
    noise = [end + 50 + 20 * ((-1) ** k) + k % 7 * (k >= 20) for k, end in enumerate(own)]
    for other in (jump, noise):
        assert [clock.drift for clock in compare_traces([rank(own), rank(other)]).clocks] == [0, 0]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(30))
def test_random_grids_and_clocks(seed):
    draw = random.Random(seed)
    sizes = [draw.choice([2, 3, 4]) for _ in range(draw.choice([1, 2, 3]))]
    world = 1
    for size in sizes:
        world *= size
    kinds = [(draw.choice(["all_reduce", "all_gather", "all_to_allv"]), f"axis{i}") for i in range(len(sizes))]
    done = execute(layers(world, groups_of(world, *sizes), kinds, 8, seed), world, numbered=draw.random() < 0.5)
    offsets = [draw.uniform(-1e7, 1e7) for _ in range(world)]
    ranks = [rank_transfers(done, r, offsets[r], host=f"host{r}") for r in range(world)]
    for rank, skew in enumerate(compare_traces(ranks).skews):
        assert skew.waited_us == pytest.approx(done.waited[rank], abs=1e-3)
        assert skew.shift_us is not None
