"""Placement of experts: DeepSeek's published example, the laws of any placement, and which experts move.

Experts move only where it helps enough, as few as possible, and groups stay on their node.
"""

import random
from collections import Counter

import pytest

from moe_dualpipe.expert_parallel.moves import between, plan_moves
from moe_dualpipe.expert_parallel.placement import ExpertPlacement, imbalance, in_order, place_experts

# The example of github.com/deepseek-ai/EPLB, README.md.
LOADS = [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]
PLACED = ((5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1), (7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1))


def test_the_published_example():
    assert place_experts(LOADS, 16, num_gpus=8, num_nodes=2, num_groups=4).experts == PLACED
    # Nodes do not matter if groups cannot be divided over them.
    expected = place_experts(LOADS, 16, num_gpus=8).experts
    assert expected == place_experts(LOADS, 16, num_gpus=8, num_nodes=2, num_groups=3).experts != PLACED


@pytest.mark.parametrize("seed", range(20))
def test_every_expert_is_placed_and_groups_stay_on_one_node(seed):
    rng = random.Random(seed)
    nodes, per_node, of_node = rng.choice([1, 2, 3]), rng.choice([1, 2, 4]), rng.choice([1, 2])
    gpus, groups = nodes * per_node, nodes * of_node
    size = per_node * rng.choice([1, 3])
    experts, slots = groups * size, groups * size + gpus * rng.randrange(3)
    loads = [[rng.randrange(1000) for _ in range(experts)] for _ in range(2)]
    placement = place_experts(loads, slots, gpus, nodes, groups)
    for load_E, placed in zip(loads, placement.experts, strict=True):
        copies = Counter(placed)
        assert len(placed) == slots and {*copies} == {*range(experts)}
        halves = [{expert // size for expert in placed[n * slots // nodes :][: slots // nodes]} for n in range(nodes)]
        assert sum(map(len, halves)) == groups
        for node in halves:  # the last copy went to the expert that had the most load for each of its copies
            mine = [e for e in range(experts) if e // size in node]
            largest = max((load_E[e] / copies[e] for e in mine if copies[e] < per_node), default=0)
            assert all(load_E[e] / (copies[e] - 1) >= largest for e in mine if copies[e] > 1)
        of_gpus = [placed[g * slots // gpus :][: slots // gpus] for g in range(gpus)]
        room = slots // gpus <= experts // nodes
        assert all(len({*gpu}) == len(gpu) for gpu in of_gpus if room), "two copies on one GPU"
    totals = [sum(load) for load in placement.gpu_loads(loads)]
    assert totals == pytest.approx([*map(sum, loads)])


def test_copies_that_a_gpu_cannot_use_go_to_other_experts():
    """EPLB makes five copies of expert 0 for two GPUs, so that one has three of them: 601 and 402."""
    placement = place_experts([[1000, 1, 1, 1]], 8, 2)
    assert placement.gpu_loads([[1000, 1, 1, 1]]) == [[501.5, 501.5]]


def test_loads_of_gpus_and_imbalance():
    placement = ExpertPlacement(((0, 1, 0, 2),), 2)
    assert place_experts([[8, 2, 2]], 4, 2) == placement
    assert placement.gpu_loads([[8, 2, 3]]) == [[6, 7]]
    assert in_order(1, 4, 2).gpu_loads([[8, 2, 3, 1]]) == [[10, 4]]
    assert imbalance([[6, 7], [0, 0]]) == [14 / 13, 1]


@pytest.mark.parametrize("loads,slots,options,message", [
    ([], 1, {}, "loads need at least one layer, and the same number of experts in each"),
    ([[1, 2], [1]], 2, {}, "loads need at least one layer, and the same number of experts in each"),
    ([[1, -2]], 2, {}, "loads must be finite numbers of at least 0"),
    ([[1, 2, 3]], 2, {}, "2 slots are too few for 3 experts"),
    ([[1, 2, 3]], 5, {"num_gpus": 2}, "5 slots cannot be divided evenly over 2 GPUs"),
    ([[1, 2, 3]], 4, {"num_gpus": 2, "num_nodes": 4}, "2 GPUs cannot be divided evenly over 4 nodes"),
    ([[1, 2, 3]], 4, {"num_gpus": 2, "num_groups": 2}, "3 experts cannot be divided evenly over 2 groups"),
    ([[1, 2, 3]], 4, {"num_gpus": 0}, "4 slots cannot be divided evenly over 0 GPUs"),
])  # fmt: skip
def test_numbers_that_do_not_fit_are_refused(loads, slots, options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        place_experts(loads, slots, **{"num_gpus": 1} | options)


# ---- Moves ----


UNEVEN = [[9, 8, 1, 1, 2, 3, 4, 5], [1, 1, 1, 1, 1, 1, 1, 2]]


def test_only_layers_that_gain_enough_change():
    old = in_order(2, 8, 4)
    moves = plan_moves(old, UNEVEN, 0.2)
    assert moves.placement.experts[1] == old.experts[1] and moves.placement.experts[0] != old.experts[0]
    before, after = (imbalance(one.gpu_loads(UNEVEN)) for one in (old, moves.placement))
    assert (moves.before, moves.after) == (sum(before) / 2, sum(after) / 2) and after[0] < 0.8 * before[0]
    assert plan_moves(old, UNEVEN, 1 - after[0] / before[0]).moved == 0  # it must fall by more
    assert str(moves) == "4 experts moved: the busiest of 4 ranks had 1.70 times the mean load, and would have had 1.27"
    assert str(plan_moves(old, UNEVEN, 0.5)) == "no expert moved: the busiest of 4 ranks had 1.70 times the mean load"


def test_ranks_and_slots_are_numbered_so_that_experts_stay():
    old, loads = in_order(1, 8, 4), [[1] * 8]
    for placed, moved in ((range(7, -1, -1), 8), ((1, 0, 2, 3, 4, 5, 7, 6), 0)):
        assert between(old, ExpertPlacement((tuple(placed),), 4), loads).moved == moved
    swapped = plan_moves(ExpertPlacement(((0, 1, 2, 3),), 2), [[6, 5, 1, 2]])  # best: 0 with 2, 1 with 3
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
