"""`build` returns the published orders, and refuses numbers that do not fit; and the orders of stages."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.schedule import (
    NAMES,
    Forward,
    add_comms,
    build,
    parse,
    validate,
)
from moe_dualpipe.schedule.stage_order import order_of_completion, order_of_use
from tests.support.schedules import SIZES

GOLDEN = Path(__file__).parent / "golden"
# SHA-256 of the CSV of the actions that DeepSeek's package (github.com/deepseek-ai/DualPipe, commit 3da1bbe) runs,
# recorded from its `step` with the computation replaced by a log.
DEEPSEEK_ORDERS = json.loads((GOLDEN / "deepseek_orders.json").read_text())


@pytest.mark.parametrize("name", ["dualpipe", "dualpipev"])
def test_dualpipe_orders_equal_deepseeks(name):
    sizes = [size for size in DEEPSEEK_ORDERS if size.split()[0] == name]
    assert len(sizes) > 20
    for size in sizes:
        csv = build(name, *map(int, size.split()[1:])).to_csv()
        assert hashlib.sha256(csv.encode()).hexdigest() == DEEPSEEK_ORDERS[size], size


TORCHS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


def torch_order(name, ranks, micro_batches, chunks, rank):
    """The actions of `rank` from torch's schedule class, created without the stages that its constructor needs."""
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


MORE_CHUNKS = [("interleaved_1f1b", ranks, 3 * ranks, chunks) for ranks, chunks in ((2, 3), (3, 2), (4, 4))]


@pytest.mark.parametrize("size", [*(size for size in SIZES if size[0] in TORCHS), *MORE_CHUNKS], ids=str)
def test_order_equals_torchs(size):
    name, ranks, micro_batches, *_ = size
    schedule = validate(build(*size))
    chunks = len(schedule.placement.stages[0])
    # The list (not the execution) of torch 2.13 numbers the forwards of the last rank of 1F1B from 1 instead of 0.
    ranks_to_compare = ranks - 1 if name == "1f1b" else ranks
    for rank, actions in enumerate(schedule.actions[:ranks_to_compare]):
        assert list(map(str, actions)) == torch_order(name, ranks, micro_batches, chunks, rank)


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
        # As in the paper for 4 stages: micro-batches 0 and 1 flow down, 2 and 3 flow up.
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
def test_small_orders(size, rows):
    assert build(*size).to_csv().splitlines() == rows


@pytest.mark.parametrize(
    "args,message",
    [
        (
            ("dualpipe", 4, 9),
            "got 9 for 4 ranks (interleaved_overlap needs 4); use 10",
        ),
        (
            ("dualpipe", 4, 6),
            "got 6 for 4 ranks (interleaved_overlap needs 4); use 8",
        ),
        (("dualpipe", 3, 12), "dualpipe needs an even number of pipeline ranks: got 3; use 4, or dualpipev"),
        (
            ("dualpipev", 3, 5),
            "got 5 for 3 ranks (interleaved_overlap needs 3); use 6",
        ),
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
        (("", 4, 8), "unknown schedule ''; choose from: gpipe, 1f1b, interleaved_1f1b"),
    ],
)
def test_errors_suggest_the_nearest_valid_numbers(args, message):
    with pytest.raises(ValueError) as error:
        build(*args)
    assert message in str(error.value)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 9), st.integers(1, 30))
def test_any_numbers_give_a_valid_schedule_or_an_error_that_names_them(name, ranks, micro_batches):
    try:
        schedule = build(name, ranks, micro_batches)
    except ValueError as error:
        assert str(ranks) in str(error)
    else:
        assert validate(schedule) is schedule
        forward = schedule.forward_only()
        steps = [step for steps in add_comms(forward) for step in steps if isinstance(step, Forward)]
        assert len(steps) == len({*steps}) == schedule.num_stages * micro_batches


def test_holders_that_differ_wait_for_the_slowest():
    """A stage has the place of its slowest holder."""
    lists = ("1B0 0F0 0B0", "0B2 1F2 1B2 0F3")
    actions = tuple(tuple(parse(text) for text in line.split()) for line in lists)
    schedule = dataclasses.replace(build("dualpipe", 2, 4), actions=actions)
    assert order_of_completion(schedule) == (1, 0)  # places from the end: 1 at -3 and -2, 0 at -1 and -4
    assert order_of_use(schedule) == (0, 1)  # from the start: 0 at 1 and 0, 1 at 0 and 1; ties go to the lower stage
