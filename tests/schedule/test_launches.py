"""`check_launches` finds orders that differ within a group, and waits that form a cycle."""

import pytest

from moe_dualpipe.schedule import ScheduleError
from moe_dualpipe.schedule.launches import CommLaunch, Group, Wait, check_launches

PAIR, ALL = Group("pair", (0, 2)), Group("all", (0, 1, 2))


def launches(group, *whats):
    return tuple(CommLaunch(group, what) for what in whats)


def test_equal_orders_may_be_mixed_with_other_groups_in_any_way():
    whats = launches(ALL, "a", "b")
    programs = [
        (*whats, *launches(PAIR, "x"), Wait(2), Wait(0)),
        (whats[0], Wait(0), whats[1], Wait(2)),
        (*launches(PAIR, "x"), whats[0], Wait(0), whats[1], Wait(3)),
    ]
    assert check_launches("run", programs) == {ALL: 2, PAIR: 1}


def test_the_first_difference_is_shown_side_by_side():
    whats = [*"abcdefghij"]
    other = [*whats[:5], whats[6], whats[5], *whats[7:]]
    with pytest.raises(ScheduleError) as error:
        check_launches("run", [launches(ALL, *whats), launches(ALL, *whats), launches(ALL, *other)])
    assert str(error.value).splitlines() == [
        "run: in the group all of ranks 0, 1, 2, the orders of launches differ",
        "launch  rank 0  rank 2",
        *(f"  {i}     {letter}       {letter}" for i, letter in enumerate("cde", start=2)),
        "> 5     f       g",
        "  6     g       f",
        "  7     h       h",
        "  8     i       i",
    ]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_rank_that_launches_less_is_found(missing):
    programs = [launches(ALL, *"ab"[: 1 if rank == missing else 2]) for rank in range(3)]
    with pytest.raises(ScheduleError, match=r"> 1     [b-]       [b-]"):
        check_launches("run", programs)


def test_a_rank_outside_the_group_is_found():
    with pytest.raises(ScheduleError, match="rank 1 launches in the group pair of ranks 0, 2, which it is not in"):
        check_launches("run", [launches(PAIR, "a")] * 3)


def test_ranks_that_wait_for_each_other_are_named():
    other = Group("other", (0, 1))
    first, second = launches(ALL, "a"), launches(other, "b")
    programs = [(*first, Wait(0), *second, Wait(2)), (*second, Wait(0), *first), (*first, Wait(0))]
    with pytest.raises(ScheduleError) as error:
        check_launches("run", programs)
    assert str(error.value).splitlines() == [
        "run: ranks wait for each other",
        "rank 0 waits for a (all of ranks 0, 1, 2): rank 1 must launch it",
        "rank 1 waits for b (other of ranks 0, 1): rank 0 must launch it",
    ]
    in_time = (*second, *first, Wait(0))  # the wait of rank 1 follows both launches
    assert check_launches("run", [programs[0], in_time, programs[2]]) == {ALL: 1, other: 1}


def test_of_several_waiting_ranks_only_those_of_the_cycle_are_named():
    """Rank 0 waits for a rank of the cycle. Ranks 1 and 2 have both launched a."""
    lead, pair, other = Group("lead", (0, 1)), Group("pair", (1, 2)), Group("other", (1, 2))
    a, b = launches(pair, "a", "b")
    first, c = launches(lead, "first"), launches(other, "c")
    with pytest.raises(ScheduleError) as error:
        check_launches("run", [(*first, Wait(0)), (a, b, Wait(1), *c, *first), (a, *c, Wait(1), b)])
    assert str(error.value).splitlines() == [
        "run: ranks wait for each other",
        "rank 1 waits for b (pair of ranks 1, 2): rank 2 must launch it",
        "rank 2 waits for c (other of ranks 1, 2): rank 1 must launch it",
    ]
