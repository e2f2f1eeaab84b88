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


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("whats", ["abc", "abcde", "acbd"])
def test_a_rank_that_launches_less_or_more_or_in_another_order_is_found(odd, whats):
    programs = [launches(ALL, *(whats if rank == odd else "abcd")) for rank in range(3)]
    with pytest.raises(
        ScheduleError, match="run: in the group all of ranks 0, 1, 2, the orders of launches differ"
    ) as error:
        check_launches("run", programs)
    assert [line[0] for line in str(error.value).splitlines()].count(">") == 1


def test_a_rank_outside_the_group_is_found():
    with pytest.raises(ScheduleError, match="rank 1 launches in the group pair of ranks 0, 2, which it is not in"):
        check_launches("run", [launches(PAIR, "a")] * 3)


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
