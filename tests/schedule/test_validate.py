"""`validate` refuses invalid schedules, and its error shows where they are invalid; the same for transfers.

`add_comms` derives transfers that cannot deadlock, and `validate_transfers` refuses every other order.
"""

import itertools
from dataclasses import replace

import pytest

from moe_dualpipe.schedule import (
    Backward,
    Flow,
    Forward,
    Overlap,
    Part,
    Placement,
    Recv,
    Schedule,
    ScheduleError,
    Send,
    add_comms,
    build,
    grid,
    members,
    receive_early,
    validate,
    validate_transfers,
)
from moe_dualpipe.schedule.comms import carried
from moe_dualpipe.schedule.walk import needs, produces, walk
from tests.support.schedules import SIZES

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


def test_a_large_grid_is_cut_to_a_few_ranks_and_steps_whatever_is_marked():
    row = tuple(Forward(0, i) for i in range(20_000))
    assert grid([row]).splitlines()[0] == "steps 0 to 5 of 20000:"
    assert grid([row], [(0, i) for i in range(20_000)]).count(">") == 64
    lines = grid([row[:2]] * 5000, [(9, 1), (4000, 0)]).splitlines()
    assert lines[0] == "ranks 4 to 67 of 5000:" and len(lines) == 65 and lines[6] == "rank 9  0F0 >0F1<"


def holders(*routes):
    """A schedule of two micro-batches for each route, which rank after rank runs without overlap."""
    size = 2 * len(routes)
    placement = Placement(routes)
    rows = [[] for _ in range(placement.num_ranks)]
    for i in range(size):
        for action, stages in ((Forward, range(len(routes[0]))), (Backward, reversed(range(len(routes[0]))))):
            for stage in stages:
                rows[placement.route_of(i, size)[stage]].append(action(stage, i))
    return Schedule("mine", placement, size, tuple(map(tuple, rows)))


def test_all_stages_of_a_rank_have_the_same_ranks():
    """Otherwise, ranks with different stages would sum gradients in one group, and disagree on what it exchanges."""
    for routes in ([(0, 1), (1, 0)], [(0, 1, 0, 1)], [(0, 1, 2, 3), (3, 2, 1, 0)], [(0, 1), (2, 3)]):
        assert validate(holders(*routes))
    for routes, problem in (
        ([(0, 1, 0), (2, 1, 0)], r"rank 0 holds stage 0, as do ranks \(0, 2\), and stage 2, as do \(0,\): all stages"),
        ([(0, 1), (1, 2)], r"rank 1 holds stage 1, as do ranks \(1, 2\), and stage 0, as do \(0, 1\): all stages of a"),
    ):
        with pytest.raises(ScheduleError, match=problem):
            validate(holders(*routes))


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


# ---- Transfers ----


@pytest.mark.parametrize("name,ranks,micro_batches", [*(size for size in SIZES if size[1] < 16), ("gpipe", 8, 20)])
def test_transfers_match_in_order_and_do_not_deadlock(name, ranks, micro_batches):
    schedule = build(name, ranks, micro_batches)
    lists = add_comms(schedule)
    assert [tuple(s for s in steps if not isinstance(s, Send | Recv)) for steps in lists] == list(schedule.actions)
    assert runs_with_blocking_transfers(schedule, lists)
    early = receive_early(schedule, lists)
    assert_posted_as_early_as_data_can_arrive(schedule, lists, early)


def assert_posted_as_early_as_data_can_arrive(schedule, lists, early):
    """A receive moves before the preceding action if and only if this action is not an ancestor of the data.

    Neither sends nor receives change their order.
    """
    ancestors = ancestors_of_results(schedule)
    for rank, (before, after) in enumerate(zip(lists, early, strict=True)):
        for kind in (Recv, Send | Forward | Backward | Overlap):
            assert [step for step in after if isinstance(step, kind)] == [s for s in before if isinstance(s, kind)]
        last = None  # receives keep their order
        for recv in (step for step in before if isinstance(step, Recv)):
            actions, posted = actions_before(before, recv), actions_before(after, recv)
            moves = bool(actions) and (rank, actions[-1]) not in ancestors[carried(recv)] and last != actions
            assert posted == (actions[:-1] if moves else actions), recv
            last = posted


def actions_before(steps, recv):
    return [step for step in steps[: steps.index(recv)] if not isinstance(step, Send | Recv)]


def ancestors_of_results(schedule):
    """For each result, the (rank, action) pairs that must have run: by data, or earlier on the same rank."""
    found, last = {}, [frozenset()] * schedule.num_ranks
    spans = [(span.start, rank, span.action) for rank, own in enumerate(walk(schedule, lambda _: 1)) for span in own]
    for _, rank, action in sorted(spans, key=lambda span: span[0]):
        inputs = (found[need] for member in members(action) for need in needs(member, schedule.num_stages))
        last[rank] = last[rank].union(*inputs, [(rank, action)])
        found |= {produces(member): last[rank] for member in members(action)}
    return found


def peer(schedule, step):
    """Return the other rank of a transfer and the stage there."""
    there = step.stage + (1 if (step.flow is Flow.ACTIVATION) == isinstance(step, Send) else -1)
    return schedule.rank_of(there, step.micro_batch), there


def runs_with_blocking_transfers(schedule, lists):
    """Whether all ranks finish if a send and its receive happen together or not at all (rendezvous)."""
    position = [0] * len(lists)

    def head(rank):
        return lists[rank][position[rank]] if position[rank] < len(lists[rank]) else None

    progress = True
    while progress:
        progress = False
        for rank in range(len(lists)):
            step = head(rank)
            if isinstance(step, Send):
                to, stage = peer(schedule, step)
                if head(to) == Recv(stage, step.micro_batch, step.flow):
                    position[rank] += 1
                    position[to] += 1
                    progress = True
            elif step is not None and not isinstance(step, Recv):
                position[rank] += 1
                progress = True
    return position == [len(steps) for steps in lists]


CHANGED = [("1f1b", 3, 4), ("dualpipe", 4, 8), ("dualpipev", 2, 5), ("interleaved_1f1b", 2, 4), ("chimera", 4, 8)]


def is_transfer(step):
    return isinstance(step, Send | Recv)


@pytest.mark.parametrize("size", CHANGED, ids=str)
def test_a_missing_or_repeated_transfer_is_refused(size):
    schedule = build(*size)
    lists = add_comms(schedule)
    for rank, steps in enumerate(lists):
        for i, step in enumerate(steps):
            if is_transfer(step):
                lost = "never sends " if isinstance(step, Send) else "runs .* before it has rec"
                for row, problem in (
                    (steps[:i] + steps[i + 1 :], f"{lost}(.|\\n)*>"),
                    ((*steps, step), f"runs {step} twice"),
                ):
                    with pytest.raises(ScheduleError, match=f"rank {rank} {problem}"):
                        validate_transfers(schedule, (*lists[:rank], row, *lists[rank + 1 :]))


@pytest.mark.parametrize("size", CHANGED, ids=str)
def test_a_moved_transfer_is_refused_if_and_only_if_it_deadlocks_or_is_in_the_wrong_place(size):
    schedule = build(*size)
    lists = add_comms(schedule)
    outcomes = set()
    for rank, steps in enumerate(lists):
        for i, j in itertools.product(range(len(steps)), range(len(steps))):
            if not is_transfer(steps[i]) or abs(i - j) > 3:
                continue
            without = steps[:i] + steps[i + 1 :]
            row = (*without[:j], steps[i], *without[j:])
            moved = (*lists[:rank], row, *lists[rank + 1 :])
            possible = is_in_place(row, j) and runs_with_blocking_transfers(schedule, moved)
            outcomes.add(possible)
            if possible:
                validate_transfers(schedule, moved)
            else:
                with pytest.raises(ScheduleError, match=r"before it has (computed|received)|deadlock"):
                    validate_transfers(schedule, moved)
    assert outcomes == {True, False}


def is_in_place(row, i):
    """Whether the send at `i` follows the action with its data, or the receive precedes the action that uses it."""
    kind = Forward if row[i].flow is Flow.ACTIVATION else Backward
    (action,) = (
        k
        for k, step in enumerate(row)
        if not is_transfer(step)
        for member in members(step)
        if isinstance(member, kind)
        and (member.stage, member.micro_batch) == (row[i].stage, row[i].micro_batch)
        and getattr(member, "part", None) is not Part.WEIGHT
    )
    return action < i if isinstance(row[i], Send) else i < action


def test_the_gradient_of_a_pair_is_sent_before_its_activation():
    steps = add_comms(build("dualpipe", 4, 8))[1]
    at = next(i for i, step in enumerate(steps) if isinstance(step, Overlap))
    sends = [str(step) for step in steps[at:] if isinstance(step, Send)]
    assert (str(steps[at]), sends[:2]) == ("(2F6;1B0)OVERLAP_F_B", ["1SEND_B0", "2SEND_F6"])


LISTS = add_comms(build("1f1b", 3, 3))
WRONG = {
    "the compute actions of rank 1 are not those of the schedule": (LISTS[0], LISTS[1][:-2], LISTS[2]),
    "lists for 2 ranks, but 1f1b has 3": LISTS[:2],
    "lists for 4 ranks, but 1f1b has 3": (*LISTS, (Forward(0, 0),)),
    "0SEND_F0 does not belong on rank 2": (*LISTS[:2], (*LISTS[2], Send(0, 0, Flow.ACTIVATION))),
}


@pytest.mark.parametrize("message", WRONG)
def test_lists_that_are_not_those_of_the_schedule_are_refused(message):
    with pytest.raises(ScheduleError, match=message):
        validate_transfers(build("1f1b", 3, 3), WRONG[message])
