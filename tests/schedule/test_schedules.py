"""The orders are the published ones, and the laws catch every way of breaking them."""

import hashlib
import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.schedule import (
    NAMES,
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
    halves,
    parse,
    receive_early,
    validate,
    validate_transfers,
)

GOLDEN = Path(__file__).parent / "golden"
# SHA-256 of the order, as CSV, that DeepSeek's package (github.com/deepseek-ai/DualPipe, commit 3da1bbe) executes;
# recorded by running its `step` with the computation replaced by a log.
DEEPSEEK_ORDERS = json.loads((GOLDEN / "deepseek_orders.json").read_text())

SIZES = [("1f1b", ranks, ranks + more) for ranks in (1, 2, 3, 4, 8) for more in (0, 1, 5)]
SIZES += [("dualpipe", ranks, 2 * ranks + more) for ranks in (2, 4, 6, 8, 16) for more in (0, 2, 10)]
SIZES += [(name, ranks, ranks + more) for name in ("gpipe", "zb1p", "zbv") for ranks in (1, 2, 5) for more in (0, 1, 7)]
SIZES += [("interleaved_1f1b", ranks, ranks * groups) for ranks in (1, 2, 3, 4) for groups in (1, 2, 4)]
SIZES += [("chimera", ranks, ranks + more) for ranks in (2, 4, 8) for more in (0, 2, 6, 24)]
SIZES += [("dualpipev", ranks, 2 * ranks + more) for ranks in (1, 2, 3, 4, 8, 16) for more in (0, 1, 2, 7)]


@pytest.mark.parametrize("size", DEEPSEEK_ORDERS)
def test_order_is_deepseeks(size):
    name, ranks, micro_batches = size.split()
    csv = build(name, int(ranks), int(micro_batches)).to_csv()
    assert hashlib.sha256(csv.encode()).hexdigest() == DEEPSEEK_ORDERS[size]


@pytest.mark.parametrize("file", ["dualpipe_4_10.csv", "dualpipev_2_6.csv"])
def test_order_is_the_golden_file(file):
    name, ranks, micro_batches = file.removesuffix(".csv").split("_")
    assert build(name, int(ranks), int(micro_batches)).to_csv() == (GOLDEN / file).read_text()


def test_1f1b_literally():
    assert build("1f1b", 3, 4).to_csv().splitlines() == [
        "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3",
        "1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3",
        "2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3",
    ]


@pytest.mark.parametrize("name,ranks,micro_batches", SIZES)
def test_every_built_schedule_is_valid(name, ranks, micro_batches):
    schedule = build(name, ranks, micro_batches)
    assert validate(schedule) is schedule
    assert validate_forward_only(schedule)


def validate_forward_only(schedule: Schedule) -> bool:
    """A forward-only order has no backwards to count, so check it by running it: every forward, once, no deadlock."""
    forward = schedule.forward_only()
    steps = [step for steps in add_comms(forward) for step in steps if isinstance(step, Forward)]
    return len(steps) == len(set(steps)) == schedule.num_stages * schedule.num_micro_batches


def test_the_forward_half_of_a_schedule_says_so():
    forward = build("dualpipe", 2, 4).forward_only()
    assert forward.name == "dualpipe, forward only"
    assert forward.to_csv() == "0F0,1F2,0F1,1F3\n0F2,1F0,0F3,1F1\n"


# ---- Text form ----

ids = st.integers(0, 300)
singles = st.one_of(
    st.builds(Forward, ids, ids),
    st.builds(Backward, ids, ids, st.sampled_from(Part)),
    st.builds(Send, ids, ids, st.sampled_from(Flow)),
    st.builds(Recv, ids, ids, st.sampled_from(Flow)),
)


@given(st.one_of(singles, st.builds(Overlap, st.builds(Forward, ids, ids), st.builds(Backward, ids, ids))))
def test_text_form_round_trips(step):
    assert parse(str(step)) == step


@pytest.mark.parametrize(
    "step,text",
    [
        (Forward(0, 3), "0F3"),
        (Backward(7, 1), "7B1"),
        (Backward(7, 1, Part.INPUT), "7I1"),
        (Backward(7, 1, Part.WEIGHT), "7W1"),
        (Overlap(Forward(0, 5), Backward(7, 1)), "(0F5;7B1)OVERLAP_F_B"),
        (Send(2, 3, Flow.ACTIVATION), "2SEND_F3"),
        (Recv(2, 3, Flow.GRADIENT), "2RECV_B3"),
    ],
)
def test_text_form_is_torchs(step, text):
    from torch.distributed.pipelining.schedules import _Action

    assert str(step) == text
    assert str(_Action.from_str(text)) == text


@pytest.mark.parametrize("text", ["", "F3", "0X3", "٣F0", "0F", "(0F5;7I1)OVERLAP_F_B", "(7B1;0F5)OVERLAP_F_B", "0F-1"])
def test_text_that_is_no_action(text):
    with pytest.raises(ValueError, match=r"not an action|pairs a forward"):
        parse(text)


@pytest.mark.parametrize("name,ranks,micro_batches", SIZES)
def test_csv_round_trips(name, ranks, micro_batches):
    schedule = build(name, ranks, micro_batches)
    again = Schedule.from_csv(schedule.to_csv())
    assert again.actions == schedule.actions
    assert again == schedule
    assert again.num_micro_batches == micro_batches
    for stage, micro_batch in itertools.product(range(schedule.num_stages), range(micro_batches)):
        assert again.rank_of(stage, micro_batch) == schedule.rank_of(stage, micro_batch)


@pytest.mark.parametrize("text", [
    "0F0, ,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n",
    "\n0F0,0F1,0B0,0B1\n\n1F0,1B0,1F1,1B1\n,,,\n",
    '"0F0","0F1","0B0","0B1"\n1F0,1B0,1F1,1B1',
])  # fmt: skip
def test_csv_as_spreadsheets_write_it(text):
    assert Schedule.from_csv(text) == build("1f1b", 2, 2)


def test_csv_as_torch_writes_it():
    text = "0UNSHARD,0F0,0F1,,0B0,0B1,0RESHARD,0REDUCE_GRAD\n,1F0,1B0,1F1,1B1,1REDUCE_GRAD\n"
    assert Schedule.from_csv(text).actions == build("1f1b", 2, 2).actions


@pytest.mark.parametrize(
    "csv,problem",
    [
        ("", "no forward"),
        ("0F0,0B0,hello", "not an action"),
        ("0F0,0B0\n1F0,1X0", "line 2, cell 2: not an action: '1X0'"),
        ("0F0,0B0,999999999F0", "micro-batch 0 has no forward on stage 1 of 1000000000"),
        ("0F0\n1F1", "has no forward on stage"),
        ("0F0,1F1,0F2\n1F0,0F1,1F2", "divided evenly"),
    ],
)
def test_csv_that_is_no_schedule(csv, problem):
    with pytest.raises(ValueError, match=problem):
        Schedule.from_csv(csv)  # a ScheduleError where every cell is an action


# ---- Against torch's own ----


TORCHS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


def torch_order(name, ranks, micro_batches, chunks, rank):
    """What torch's own class lists for `rank`, without making the stages that it asks for."""
    from torch.distributed.pipelining import schedules

    schedule: Any = object.__new__(getattr(schedules, TORCHS[name]))
    schedule._n_microbatches, schedule.pp_group_size, schedule.n_local_stages = micro_batches, ranks, chunks
    schedule._num_stages = schedule.num_stages = ranks * chunks
    schedule.number_of_rounds = max(1, micro_batches // ranks)
    schedule.microbatches_per_round = micro_batches // schedule.number_of_rounds
    if name in ("gpipe", "1f1b"):
        actions = schedule._get_pipeline_order()[rank]
    else:
        actions = schedule._calculate_single_rank_operations(rank)
    return [str(action) for action in actions if action is not None and "REDUCE_GRAD" not in str(action)]


@pytest.mark.parametrize("name,ranks,micro_batches", [size for size in SIZES if size[0] in TORCHS])
def test_order_is_torchs(name, ranks, micro_batches):
    schedule = build(name, ranks, micro_batches)
    chunks = len(schedule.placement.stages[0])
    # torch 2.13 numbers the forwards of 1F1B's last rank from 1, one past the end: a slip of its listing, not its run.
    ranks_to_compare = ranks - 1 if name == "1f1b" else ranks
    for rank, actions in enumerate(schedule.actions[:ranks_to_compare]):
        assert list(map(str, actions)) == torch_order(name, ranks, micro_batches, chunks, rank)


@pytest.mark.parametrize("ranks,chunks", [(2, 3), (3, 2), (4, 4)])
def test_interleaved_order_is_torchs_for_any_number_of_chunks(ranks, chunks):
    schedule = validate(build("interleaved_1f1b", ranks, 3 * ranks, num_chunks=chunks))
    for rank, actions in enumerate(schedule.actions):
        assert list(map(str, actions)) == torch_order("interleaved_1f1b", ranks, 3 * ranks, chunks, rank)


@pytest.mark.parametrize(
    "size,rows",
    [
        (("gpipe", 2, 2), ["0F0,0F1,0B0,0B1", "1F0,1F1,1B0,1B1"]),
        (
            ("zb1p", 3, 4),
            [
                "0F0,0F1,0F2,0I0,0W0,0F3,0I1,0W1,0I2,0W2,0I3,0W3",
                "1F0,1F1,1I0,1F2,1I1,1W0,1F3,1I2,1W1,1I3,1W2,1W3",
                "2F0,2I0,2F1,2I1,2F2,2I2,2W0,2F3,2I3,2W1,2W2,2W3",
            ],
        ),
        # The merge that the paper draws for 4 stages: micro-batches 0 and 1 go down, 2 and 3 up.
        (
            ("chimera", 4, 4),
            [
                "0F0,0F1,3F2,3B2,3F3,3B3,0B0,0B1",
                "1F0,2F2,1F1,2F3,2B2,1B0,2B3,1B1",
                "1F2,2F0,1F3,2F1,2B0,1B2,2B1,1B3",
                "0F2,0F3,3F0,3B0,3F1,3B1,0B2,0B3",
            ],
        ),
    ],
)
def test_small_orders_literally(size, rows):
    assert build(*size).to_csv().splitlines() == rows


# ---- Placement ----


def test_placements():
    assert Placement.straight(3).stages == ((0,), (1,), (2,))
    assert Placement.interleaved(2, 3).stages == ((0, 2, 4), (1, 3, 5))
    assert Placement.vee(3).stages == ((0, 5), (1, 4), (2, 3))
    assert Placement.mirrored(4).stages == ((0, 3), (1, 2), (2, 1), (3, 0))
    assert Placement.mirrored(4).holders(1) == (1, 2)
    assert Placement.vee(3).holders(5) == (0,)
    mirrored = build("dualpipe", 4, 10)
    assert [mirrored.rank_of(0, micro_batch) for micro_batch in range(10)] == [0] * 5 + [3] * 5


# ---- Transfers ----


@pytest.mark.parametrize("name,ranks,micro_batches", SIZES)
def test_transfers_pair_up_in_order_and_cannot_deadlock(name, ranks, micro_batches):
    schedule = build(name, ranks, micro_batches)
    lists = add_comms(schedule)
    assert [tuple(s for s in steps if not isinstance(s, Send | Recv)) for steps in lists] == list(schedule.actions)
    assert_links_are_fifo(schedule, lists)
    assert_runs_with_blocking_transfers(schedule, lists)
    early = [receive_early(steps) for steps in lists]
    assert_links_are_fifo(schedule, early)
    for steps, before in zip(early, lists, strict=True):
        assert sorted(map(str, steps)) == sorted(map(str, before))
        for recv in (step for step in steps if isinstance(step, Recv)):
            computed = [i for i, step in enumerate(before) if not isinstance(step, Send | Recv)]
            first = computed[0] if computed else 0
            assert steps.index(recv) <= max(before.index(recv), first)


def peer(schedule, step):
    there = step.stage + (1 if (step.flow is Flow.ACTIVATION) == isinstance(step, Send) else -1)
    return schedule.rank_of(there, step.micro_batch), there


def assert_links_are_fifo(schedule, lists):
    sent, received = {}, {}
    for rank, steps in enumerate(lists):
        for step in steps:
            if isinstance(step, Send):
                to, stage = peer(schedule, step)
                sent.setdefault((rank, to), []).append(Recv(stage, step.micro_batch, step.flow))
            elif isinstance(step, Recv):
                received.setdefault((peer(schedule, step)[0], rank), []).append(step)
    assert sent == received
    assert all(a != b for a, b in sent)


def assert_runs_with_blocking_transfers(schedule, lists):
    assert runs_with_blocking_transfers(schedule, lists)


def runs_with_blocking_transfers(schedule, lists):
    """Rendezvous semantics: a send and its receive happen together or not at all."""
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


# ---- What validate refuses ----

MUTATED = [("1f1b", 3, 5), ("dualpipe", 4, 10), ("dualpipev", 2, 5), ("dualpipev", 1, 2)]


def with_row(schedule, rank, row):
    return replace(schedule, actions=(*schedule.actions[:rank], tuple(row), *schedule.actions[rank + 1 :]))


@pytest.mark.parametrize("size", MUTATED, ids=str)
def test_removing_or_doubling_any_action_is_refused(size):
    schedule = build(*size)
    for rank, actions in enumerate(schedule.actions):
        for i, action in enumerate(actions):
            with pytest.raises(ScheduleError):
                validate(with_row(schedule, rank, actions[:i] + actions[i + 1 :]))
            with pytest.raises(ScheduleError, match=">"):
                validate(with_row(schedule, rank, (*actions, action)))
            for half in halves(action) if isinstance(action, Overlap) else ():
                with pytest.raises(ScheduleError):
                    validate(with_row(schedule, rank, (*actions[:i], half, *actions[i + 1 :])))


@pytest.mark.parametrize("size", MUTATED, ids=str)
def test_moving_any_action_before_what_it_needs_is_refused(size):
    """Needs on the same rank: backward after forward, W after I, and at the fold the far stage after the near."""
    schedule = build(*size)
    moved = 0
    for rank, actions in enumerate(schedule.actions):
        for i, action in enumerate(actions):
            for half in halves(action):
                needed = [
                    j
                    for j, earlier in enumerate(actions[:i])
                    for other in halves(earlier)
                    if is_needed_locally(other, half)
                ]
                if needed:
                    j = max(needed)
                    with pytest.raises(ScheduleError, match=r"deadlocks: .*needs .* before"):
                        validate(with_row(schedule, rank, (*actions[:j], action, *actions[j:i], *actions[i + 1 :])))
                    moved += 1
    assert moved > schedule.num_micro_batches


def is_needed_locally(other, half):
    if isinstance(half, Forward):
        return isinstance(other, Forward) and other == Forward(half.stage - 1, half.micro_batch)
    if half.part is Part.WEIGHT:
        return other == Backward(half.stage, half.micro_batch, Part.INPUT)
    return other == Forward(half.stage, half.micro_batch)


def test_moving_an_action_before_what_another_rank_must_do_first_is_refused():
    schedule = build("1f1b", 2, 3)
    first = schedule.actions[0]
    # Rank 0 wants the gradient of micro-batch 0 before it sends micro-batch 0: rank 1 can never compute it.
    backward = next(i for i, action in enumerate(first) if action == Backward(0, 0))
    with pytest.raises(
        ScheduleError, match="deadlocks: rank 0 needs 0F0 and 1B0 before 0B0; rank 1 needs 0F0 before 1F0"
    ):
        validate(with_row(schedule, 0, (first[backward], *first[:backward], *first[backward + 1 :])))


def test_an_action_on_the_wrong_rank_or_out_of_range_is_refused():
    schedule = build("1f1b", 2, 2)
    swapped = replace(schedule, actions=schedule.actions[::-1])
    with pytest.raises(ScheduleError, match="1F0 is on rank 0, but rank 1 holds stage 1 for that micro-batch"):
        validate(swapped)
    with pytest.raises(ScheduleError, match="outside"):
        validate(with_row(schedule, 0, (*schedule.actions[0], Forward(0, 9))))
    with pytest.raises(ScheduleError, match="outside"):
        validate(with_row(schedule, 0, (*schedule.actions[0], Forward(0, -1))))
    with pytest.raises(ScheduleError, match="2F0 is outside the schedule's 2 stages and 2 micro-batches"):
        validate(with_row(schedule, 0, (*schedule.actions[0], Forward(2, 0))))
    with pytest.raises(ScheduleError, match="actions for 1 ranks, but a placement on 2"):
        validate(replace(schedule, actions=schedule.actions[:1]))


def test_a_deadlock_names_only_what_is_missing():
    schedule = build("1f1b", 2, 2)
    forward, backward, *rest = schedule.actions[1]
    with pytest.raises(ScheduleError, match=r"deadlocks: rank 0 needs 1B0 before 0B0; rank 1 needs 1F0 before 1B0\n"):
        validate(with_row(schedule, 1, (backward, forward, *rest)))


def test_the_error_draws_the_grid_and_marks_the_cell():
    schedule = build("1f1b", 2, 2)
    with pytest.raises(ScheduleError) as error:
        validate(with_row(schedule, 1, (*schedule.actions[1], Backward(1, 1))))
    assert str(error.value).splitlines() == [
        "1f1b: stage 1 runs micro-batch 1 with 2 B, 0 I and 0 W instead of one B, or one I and one W",
        "rank 0  0F0 0F1 0B0 0B1  ",
        "rank 1  1F0 1B0 1F1 >1B1< >1B1<",
    ]
    with pytest.raises(ScheduleError) as error:
        validate(with_row(schedule, 1, (*schedule.actions[1], Forward(1, 0))))
    assert str(error.value).splitlines()[2] == "rank 1  >1F0< 1B0 1F1 1B1 >1F0<"
    with pytest.raises(ScheduleError) as error:  # where it should be, nothing can be marked
        validate(with_row(schedule, 1, schedule.actions[1][:-1]))
    assert str(error.value).splitlines()[2] == "rank 1  1F0 1B0 >1F1<"


def test_a_deadlock_names_what_no_rank_has_computed():
    schedule = build("dualpipe", 4, 10)
    first = schedule.actions[0]
    with pytest.raises(ScheduleError) as error:
        validate(with_row(schedule, 0, (*first[:3], first[4], first[3], *first[5:])))
    assert "rank 0 needs 3F5 before 3I5" in str(error.value)
    stuck = re.findall(r"rank (\d) needs (.*?) before (\S+)[;\n]", str(error.value))
    assert len(stuck) == 4
    ran = {name for line in str(error.value).splitlines()[1:] for name in line.partition(">")[0].split()[2:]}
    assert not any(wanted in ran for _, needs, _ in stuck for wanted in needs.split(" and "))


# ---- Bad numbers ----


@pytest.mark.parametrize(
    "args,message",
    [
        (("dualpipe", 4, 9), "dualpipe needs an even number of micro-batches >= 2 x ranks: got 9 for 4 ranks; use 10"),
        (("dualpipe", 4, 6), "dualpipe needs an even number of micro-batches >= 2 x ranks: got 6 for 4 ranks; use 8"),
        (("dualpipe", 3, 12), "dualpipe needs an even number of pipeline ranks: got 3; use 4, or dualpipev"),
        (("dualpipev", 3, 5), "dualpipev needs a number of micro-batches >= 2 x ranks: got 5 for 3 ranks; use 6"),
        (("1f1b", 4, 3), "1f1b needs a number of micro-batches >= ranks: got 3 for 4 ranks; use 4"),
        (("1f1b", 0, 3), "1f1b needs at least one pipeline rank: got 0; use 1 or more"),
        (("chimera", 4, 5), "chimera needs an even number of micro-batches >= ranks: got 5 for 4 ranks; use 6"),
        (("chimera", 5, 8), "chimera needs an even number of pipeline ranks: got 5; use 6, or dualpipev"),
        (
            ("interleaved_1f1b", 4, 9),
            "interleaved_1f1b needs a number of micro-batches that is a multiple of the ranks: "
            "got 9 for 4 ranks; use 12",
        ),
        (("interleaved_1f1b", 4, 0), "got 0 for 4 ranks; use 4"),
        (("interleaved_1f1b", 4, 8, 1), "needs at least 2 chunks per rank: got 1; use 2, or 1f1b, which has one"),
        (("dualpipe", 4, 8, 2), "dualpipe does not take a number of chunks: got 2; use it with interleaved_1f1b"),
        (("zbv", 3, -1), "zbv needs a number of micro-batches >= ranks: got -1 for 3 ranks; use 3"),
        (("dualpip", 4, 8), "unknown schedule 'dualpip'; did you mean 'dualpipe'?"),
        (("", 4, 8), "unknown schedule ''; did you mean"),
    ],
)
def test_bad_numbers_name_the_nearest_good_ones(args, message):
    with pytest.raises(ValueError) as error:
        build(*args)
    assert message in str(error.value)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 9), st.integers(1, 30))
def test_build_either_explains_or_returns_a_valid_schedule(name, ranks, micro_batches):
    try:
        schedule = build(name, ranks, micro_batches)
    except ValueError as error:
        assert str(ranks) in str(error)
    else:
        validate(schedule)


# ---- Lists with their transfers ----

LOWERED = [("1f1b", 3, 4), ("dualpipe", 4, 8), ("dualpipev", 2, 5), ("interleaved_1f1b", 2, 4), ("chimera", 4, 8)]


def is_transfer(step):
    return isinstance(step, Send | Recv)


@pytest.mark.parametrize("size", LOWERED, ids=str)
def test_removing_or_doubling_any_transfer_is_refused(size):
    schedule = build(*size)
    lists = add_comms(schedule)
    validate_transfers(schedule, lists)
    for rank, steps in enumerate(lists):
        for i, step in enumerate(steps):
            if is_transfer(step):
                fewer = (*lists[:rank], (*steps[:i], *steps[i + 1 :]), *lists[rank + 1 :])
                lost = (
                    f"rank {rank} never sends " if isinstance(step, Send) else f"rank {rank} runs .* before it has rec"
                )
                with pytest.raises(ScheduleError, match=f"{lost}(.|\\n)*>"):
                    validate_transfers(schedule, fewer)
                more = (*lists[:rank], (*steps, step), *lists[rank + 1 :])
                with pytest.raises(ScheduleError, match=f"rank {rank} runs {step} twice"):
                    validate_transfers(schedule, more)


@pytest.mark.parametrize("size", LOWERED, ids=str)
def test_moving_a_transfer_is_refused_exactly_if_blocking_ranks_would_wait_forever_or_data_is_not_there(size):
    schedule = build(*size)
    lists = add_comms(schedule)
    outcomes = set()
    for rank, steps in enumerate(lists):
        for i, j in itertools.product(range(len(steps)), range(len(steps))):
            if not is_transfer(steps[i]) or abs(i - j) > 6:
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
    """Whether the action that the transfer at `i` has to do with stands on the right side of it."""
    kind = Forward if row[i].flow is Flow.ACTIVATION else Backward
    (action,) = (
        k
        for k, step in enumerate(row)
        if not is_transfer(step)
        for half in halves(step)
        if isinstance(half, kind)
        and (half.stage, half.micro_batch) == (row[i].stage, row[i].micro_batch)
        and getattr(half, "part", None) is not Part.WEIGHT
    )
    return action < i if isinstance(row[i], Send) else i < action


def test_both_ranks_sending_first_is_refused():
    schedule = build("dualpipe", 2, 4)
    lists = tuple(tuple(step for step in steps if step not in crossing) for steps in add_comms(schedule))
    first = {Send(0, 0, Flow.ACTIVATION), Send(0, 2, Flow.ACTIVATION)}
    assert {step for steps in lists for step in steps} & first == set()
    swapped = []
    for rank, steps in enumerate(lists):
        own = 0 if rank == 0 else 2
        at = steps.index(Forward(0, own)) + 1
        swapped.append((*steps[:at], Send(0, own, Flow.ACTIVATION), Recv(1, 2 - own, Flow.ACTIVATION), *steps[at:]))
    with pytest.raises(ScheduleError, match="blocking transfers deadlock: rank 0 at 0SEND_F0; rank 1 at 0SEND_F2"):
        validate_transfers(schedule, tuple(swapped))


crossing = {
    kind(stage, micro_batch, Flow.ACTIVATION) for kind, stage in ((Send, 0), (Recv, 1)) for micro_batch in (0, 2)
}


def test_what_is_computed_must_be_what_the_schedule_says():
    schedule = build("1f1b", 2, 2)
    lists = add_comms(schedule)
    with pytest.raises(ScheduleError, match="the compute actions of rank 1 are not those of the schedule"):
        validate_transfers(schedule, (lists[0], lists[1][:-2]))


def test_lists_of_other_ranks_are_refused():
    schedule = build("1f1b", 2, 2)
    lists = add_comms(schedule)
    for other in (lists[:1], (*lists, (Forward(0, 0),))):
        with pytest.raises(ScheduleError, match=f"lists for {len(other)} ranks, but 1f1b has 2"):
            validate_transfers(schedule, other)


def test_validate_looks_at_the_transfers_as_well(monkeypatch):
    schedule = build("1f1b", 2, 2)
    lists = add_comms(schedule)
    module = sys.modules["moe_dualpipe.schedule.validate"]
    monkeypatch.setattr(module, "add_comms", lambda _: (lists[0][:1] + lists[0][2:], lists[1]))
    with pytest.raises(ScheduleError, match="rank 0 never sends 0F0\nrank 0  >0F0<"):
        validate(schedule)


def test_transfers_literally():
    """The gradient of a pair leaves before its activation; a receive is posted one action ahead."""
    lists = add_comms(build("dualpipe", 2, 4))
    assert " ".join(map(str, lists[0])) == (
        "0F0 0SEND_F0 1RECV_F2 1F2 0F1 0SEND_F1 1RECV_F3 1B2 1SEND_B2 0RECV_B0 (1F3;0B0)OVERLAP_F_B 1B3 1SEND_B3 "
        "0RECV_B1 0I1 0W1"
    )
    pair = add_comms(build("dualpipe", 4, 8))[1]
    at = next(i for i, step in enumerate(pair) if isinstance(step, Overlap))
    sends = [str(step) for step in pair[at:] if isinstance(step, Send)]
    assert (str(pair[at]), sends[:2]) == ("(2F6;1B0)OVERLAP_F_B", ["1SEND_B0", "2SEND_F6"])
    recv, first, send, back = Recv(0, 0, Flow.GRADIENT), Forward(0, 0), Send(0, 0, Flow.ACTIVATION), Backward(0, 0)
    assert receive_early((first, send, recv, back)) == (recv, first, send, back)


def test_a_transfer_on_the_wrong_rank_is_refused():
    schedule = build("1f1b", 3, 3)
    lists = add_comms(schedule)
    with pytest.raises(ScheduleError, match="0SEND_F0 does not belong on rank 2"):
        validate_transfers(schedule, (*lists[:2], (*lists[2], Send(0, 0, Flow.ACTIVATION))))


# ---- Long grids ----


def test_of_a_long_grid_only_what_is_near_the_marked_cell_is_drawn():
    schedule = build("1f1b", 2, 30)
    row = schedule.actions[1]
    with pytest.raises(ScheduleError) as error:
        validate(with_row(schedule, 1, (*row[:40], Forward(1, 3), *row[40:])))
    lines = str(error.value).splitlines()
    assert "2 forwards" in lines[0]
    assert lines[1] == "steps 1 to 45 of 61:"  # the first 1F3 stands at 6
    assert ">1F3<" in lines[3]
    assert all(len(line.split()) == 2 + 45 for line in lines[2:])


def test_labels_of_many_ranks_do_not_touch_their_rows():
    assert grid([[Forward(0, 0)]] * 101).splitlines()[::100] == ["rank 0   0F0", "rank 100 0F0"]


def test_a_short_grid_is_drawn_whole():
    assert grid(build("1f1b", 2, 2).actions) == "rank 0  0F0 0F1 0B0 0B1\nrank 1  1F0 1B0 1F1 1B1"
