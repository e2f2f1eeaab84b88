"""Which experts move: only where it helps enough, as few as possible, and groups stay on their node."""

import random

import pytest

from moe_dualpipe.expert_parallel.moves import between, plan_moves
from moe_dualpipe.expert_parallel.placement import Placement, imbalance, in_order, place_experts

LOADS = [[9, 8, 1, 1, 2, 3, 4, 5], [1, 1, 1, 1, 1, 1, 1, 2]]


def test_only_layers_that_gain_enough_change():
    old = in_order(2, 8, 4)
    moves = plan_moves(old, LOADS, 0.2)
    assert moves.placement.experts[1] == old.experts[1] and moves.placement.experts[0] != old.experts[0]
    before, after = (imbalance(one.gpu_loads(LOADS)) for one in (old, moves.placement))
    assert (moves.before, moves.after) == (sum(before) / 2, sum(after) / 2) and after[0] < 0.8 * before[0]
    assert plan_moves(old, LOADS, 1 - after[0] / before[0]).moved == 0  # it must fall by more
    assert str(moves) == "4 experts moved: the fullest of 4 ranks had 1.70 times the mean load, and would have had 1.27"
    assert str(plan_moves(old, LOADS, 0.5)) == "no expert moved: the fullest of 4 ranks had 1.70 times the mean load"


def test_ranks_and_slots_are_numbered_so_that_experts_stay():
    old, loads = in_order(1, 8, 4), [[1] * 8]
    for placed, moved in ((range(7, -1, -1), 8), ((1, 0, 2, 3, 4, 5, 7, 6), 0)):
        assert between(old, Placement((tuple(placed),), 4), loads).moved == moved
    swapped = plan_moves(Placement(((0, 1, 2, 3),), 2), [[6, 5, 1, 2]])  # best: 0 with 2, 1 with 3
    slots = swapped.placement.experts[0]
    assert {frozenset(slots[:2]), frozenset(slots[2:])} == {frozenset({0, 2}), frozenset({1, 3})}
    assert swapped.moved == 2


@pytest.mark.parametrize("seed", range(10))
def test_moves_are_as_balanced_as_the_best_placement_and_groups_stay_on_one_node(seed):
    rng = random.Random(seed)
    nodes, per_node = rng.choice([1, 2]), rng.choice([2, 4])
    gpus, groups = nodes * per_node, 2 * nodes
    experts = gpus * rng.choice([2, 4])
    loads, old = [[rng.randrange(1, 1000) for _ in range(experts)]], in_order(1, experts, gpus)
    best, moves = place_experts(loads, experts, gpus, nodes, groups), plan_moves(old, loads, 0.0, nodes, groups)
    assert sorted(moves.placement.experts[0]) == [*range(experts)]
    found, expected = (imbalance(placement.gpu_loads(loads)) for placement in (moves.placement, best))
    assert not moves.moved or found == expected
    assert moves.moved <= between(old, best, loads).moved
    of_nodes = [moves.placement.experts[0][n * experts // nodes :][: experts // nodes] for n in range(nodes)]
    assert sum(len({expert * groups // experts for expert in of_node}) for of_node in of_nodes) == groups
