"""Which pairs of ranks are measured at the same time: a round-robin tournament on two levels.

In a round, each rank has one partner. Pairs within a machine and pairs between machines never share a round: the
ranks of a machine share its network card, so otherwise the speed of a pair would depend on its round. In a round of
machines, each machine has one other machine as its partner, and all of its ranks send to ranks of that machine.
"""

from collections.abc import Sequence

Pair = tuple[int, int]


def tournament(number: int) -> list[list[Pair]]:
    """Rounds of disjoint pairs of range(number), lower one first, in which each pair appears once (circle method).

    Example: 4 -> [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]].
    """
    places = [*range(number), *([None] if number % 2 else [])]  # the partner of None rests
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append(sorted((min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None))
        places = [places[0], places[-1], *places[1:-1]]
    return [pairs for pairs in rounds if pairs]


def rounds_of(machines: Sequence[Sequence[int]]) -> list[list[Pair]]:
    """Rounds of disjoint pairs of ranks, in which each pair appears once. machines: the ranks of each.

    Example: [[0, 1], [2, 3]] -> [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]].
    """
    largest = max(map(len, machines), default=0)
    within: list[list[Pair]] = [[] for _ in range(largest)]
    for ranks in machines:
        for number, pairs in enumerate(tournament(len(ranks))):
            within[number] += [(ranks[a], ranks[b]) for a, b in pairs]
    between = []
    for matches in tournament(len(machines)):
        for shift in range(largest):
            pairs = [pair for a, b in matches for pair in _across(machines[a], machines[b], shift)]
            between.append(pairs)
    return [sorted(pairs) for pairs in [*within, *between] if pairs]


def _across(first: Sequence[int], second: Sequence[int], shift: int) -> list[Pair]:
    """The pairs of one round between two machines, which may have different numbers of ranks."""
    size = max(len(first), len(second))
    partners = [(rank, (i + shift) % size) for i, rank in enumerate(first) if shift < size]
    return [(rank, second[place]) for rank, place in partners if place < len(second)]
