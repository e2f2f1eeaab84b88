"""`validate` refuses invalid schedules, and its error shows where they are invalid."""

from dataclasses import replace

import pytest

from moe_dualpipe.schedule import (
    Backward,
    Forward,
    Overlap,
    ScheduleError,
    build,
    members,
    validate,
)
from moe_dualpipe.schedule.walk import needs, produces

MUTATED = [("1f1b", 3, 5), ("dualpipe", 4, 10), ("dualpipev", 2, 5), ("dualpipev", 1, 2)]


def with_row(schedule, rank, row):
    """The schedule with other actions on one rank."""
    return replace(schedule, actions=(*schedule.actions[:rank], tuple(row), *schedule.actions[rank + 1 :]))


@pytest.mark.parametrize("size", MUTATED, ids=str)
def test_a_missing_or_repeated_action_is_refused(size):
    schedule = build(*size)
    for rank, actions in enumerate(schedule.actions):
        for i, action in enumerate(actions):
            with pytest.raises(ScheduleError):
                validate(with_row(schedule, rank, actions[:i] + actions[i + 1 :]))
            with pytest.raises(ScheduleError, match=">"):
                validate(with_row(schedule, rank, (*actions, action)))
            for member in members(action) if isinstance(action, Overlap) else ():
                with pytest.raises(ScheduleError):
                    validate(with_row(schedule, rank, (*actions[:i], member, *actions[i + 1 :])))


@pytest.mark.parametrize("size", MUTATED, ids=str)
def test_an_action_before_its_inputs_on_the_same_rank_is_refused(size):
    """A backward needs its forward, a W its I, and at the fold the second stage needs the first."""
    schedule = build(*size)
    moved = 0
    for rank, actions in enumerate(schedule.actions):
        for i, action in enumerate(actions):
            for member in members(action):
                needed = [
                    j
                    for j, earlier in enumerate(actions[:i])
                    for other in members(earlier)
                    if produces(other) in needs(member, schedule.num_stages)
                ]
                if needed:
                    j = max(needed)
                    with pytest.raises(ScheduleError, match=r"deadlocks: .*needs .* before"):
                        validate(with_row(schedule, rank, (*actions[:j], action, *actions[j:i], *actions[i + 1 :])))
                    moved += 1
    assert moved > schedule.num_micro_batches


def test_the_error_shows_the_grid_with_the_invalid_cells_marked():
    schedule = build("1f1b", 2, 2)
    with pytest.raises(ScheduleError) as error:
        validate(with_row(schedule, 1, (*schedule.actions[1], Backward(1, 1))))
    assert str(error.value).splitlines() == [
        "1f1b: stage 1 runs micro-batch 1 with 2 B, 0 I and 0 W instead of one B, or one I and one W",
        "rank 0  0F0 0F1 0B0 0B1  ",
        "rank 1  1F0 1B0 1F1 >1B1< >1B1<",
    ]


def test_a_long_grid_is_cut_to_the_columns_near_the_marked_cells():
    schedule = build("1f1b", 2, 30)
    row = schedule.actions[1]
    with pytest.raises(ScheduleError, match="2 forwards") as error:
        validate(with_row(schedule, 1, (*row[:40], Forward(1, 3), *row[40:])))
    lines = str(error.value).splitlines()
    assert lines[1] == "steps 1 to 45 of 61:" and ">1F3<" in lines[3]  # the first 1F3 is at step 6


TWO = build("1f1b", 2, 2)
OUTSIDE = {
    "1F0 is on rank 0, but rank 1 holds stage 1 for that micro-batch": replace(TWO, actions=TWO.actions[::-1]),
    "0F9 is outside the schedule's 2 stages and 2 micro-batches": with_row(TWO, 0, (*TWO.actions[0], Forward(0, 9))),
    "0F-1 is outside the schedule's 2 stages": with_row(TWO, 0, (*TWO.actions[0], Forward(0, -1))),
    "2F0 is outside the schedule's 2 stages": with_row(TWO, 0, (*TWO.actions[0], Forward(2, 0))),
    "actions for 1 rank, but a placement on 2": replace(TWO, actions=TWO.actions[:1]),
}


@pytest.mark.parametrize("message", OUTSIDE)
def test_an_action_on_the_wrong_rank_or_out_of_range_is_refused(message):
    with pytest.raises(ScheduleError, match=message):
        validate(OUTSIDE[message])
