"""Each pair of ranks is measured once, and pairs within and between machines are never measured together."""

from itertools import combinations

import pytest

from moe_dualpipe.tools.cluster.rounds import rounds_of, tournament


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 7, 12])
def test_in_a_tournament_each_pair_meets_once_in_as_few_rounds_as_possible(number):
    rounds = tournament(number)
    assert sorted(pair for pairs in rounds for pair in pairs) == [*combinations(range(number), 2)]
    assert len(rounds) == max(0, number - 1 if number % 2 == 0 else number if number > 1 else 0)
    for pairs in rounds:
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)


@pytest.mark.parametrize("sizes", [[1], [4], [1, 1, 1], [2, 2], [3, 3, 3], [2, 3, 1], [8, 8, 8, 8]])
def test_pairs_of_machines(sizes):
    machines, first = [], 0
    for size in sizes:
        machines.append([*range(first, first + size)])
        first += size
    home = {rank: number for number, ranks in enumerate(machines) for rank in ranks}
    rounds = rounds_of(machines)
    assert sorted(pair for pairs in rounds for pair in pairs) == [*combinations(range(first), 2)]
    for pairs in rounds:
        assert pairs and len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)
        assert len({home[a] == home[b] for a, b in pairs}) == 1
        partners = {}
        for a, b in pairs:
            partners.setdefault(home[a], set()).add(home[b])
            partners.setdefault(home[b], set()).add(home[a])
        assert all(len(others) == 1 for others in partners.values())


def test_all_ranks_of_equal_machines_send_between_machines_in_each_round():
    """So that all links share the network cards with as many others."""
    rounds = rounds_of([[0, 1], [2, 3], [4, 5], [6, 7]])
    assert [len(pairs) for pairs in rounds] == [4] * 7
