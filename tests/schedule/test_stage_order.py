"""The orders in which all ranks sum the gradients of stages, and gather their weights."""

import dataclasses

import pytest

from moe_dualpipe.schedule import NAMES, build, default_micro_batches, members, parse
from moe_dualpipe.schedule.stage_order import order_of_completion, order_of_use


@pytest.mark.parametrize("name", NAMES)
def test_each_stage_has_the_place_of_its_slowest_holder(name):
    schedule = build(name, 4, max(8, default_micro_batches(4)))
    ends, starts = {}, {}
    for actions in schedule.actions:
        on_rank = [{member.stage for member in members(action)} for action in actions]
        for stage in {stage for stages in on_rank for stage in stages}:
            uses = [i for i, stages in enumerate(on_rank) if stage in stages]
            ends.setdefault(stage, []).append(uses[-1] - len(actions))
            starts.setdefault(stage, []).append(uses[0])
    for order, places in ((order_of_completion(schedule), ends), (order_of_use(schedule), starts)):
        slowest = [max(places[stage]) for stage in order]
        assert sorted(order) == [*range(schedule.num_stages)] and slowest == sorted(slowest)


def test_holders_that_differ_wait_for_the_slowest():
    """In the schedules above, all holders of a stage have the same place."""
    lists = ("1B0 0F0 0B0", "0B2 1F2 1B2 0F3")
    actions = tuple(tuple(parse(text) for text in line.split()) for line in lists)
    schedule = dataclasses.replace(build("dualpipe", 2, 4), actions=actions)
    assert order_of_completion(schedule) == (1, 0)  # places from the end: 1 at -3 and -2, 0 at -1 and -4
    assert order_of_use(schedule) == (0, 1)  # from the start: 0 at 1 and 0, 1 at 0 and 1; ties go to the lower stage
