"""Actions and schedules round-trip through text and CSV, and the text is that of torch."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_dualpipe.schedule import (
    Backward,
    Flow,
    Forward,
    Overlap,
    Part,
    Recv,
    Schedule,
    Send,
    build,
    parse,
)
from tests.support.schedules import SIZES

ids = st.integers(0, 300)
singles = st.one_of(
    st.builds(Forward, ids, ids),
    st.builds(Backward, ids, ids, st.sampled_from(Part)),
    st.builds(Send, ids, ids, st.sampled_from(Flow)),
    st.builds(Recv, ids, ids, st.sampled_from(Flow)),
)


@given(st.one_of(singles, st.builds(Overlap, st.builds(Forward, ids, ids), st.builds(Backward, ids, ids))))
def test_actions_round_trip_through_text(step):
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
def test_text_of_actions_equals_torchs(step, text):
    from torch.distributed.pipelining.schedules import _Action

    assert str(step) == text
    assert str(_Action.from_str(text)) == text


@pytest.mark.parametrize("text", ["", "F3", "0X3", "٣F0", "0F", "(0F5;7I1)OVERLAP_F_B", "(7B1;0F5)OVERLAP_F_B", "0F-1"])
def test_parse_refuses_other_text(text):
    with pytest.raises(ValueError, match=r"not an action|pairs a forward"):
        parse(text)


@pytest.mark.parametrize("name,ranks,micro_batches", SIZES)
def test_schedules_round_trip_through_csv(name, ranks, micro_batches):
    schedule = build(name, ranks, micro_batches)
    parsed = Schedule.from_csv(schedule.to_csv())
    assert parsed.actions == schedule.actions
    assert parsed == schedule
    assert parsed.num_micro_batches == micro_batches
    for stage, micro_batch in itertools.product(range(schedule.num_stages), range(micro_batches)):
        assert parsed.rank_of(stage, micro_batch) == schedule.rank_of(stage, micro_batch)


@pytest.mark.parametrize("text", [
    "0F0, ,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n",
    "\n0F0,0F1,0B0,0B1\n\n1F0,1B0,1F1,1B1\n,,,\n",
    '"0F0","0F1","0B0","0B1"\n1F0,1B0,1F1,1B1',
    "0UNSHARD,0F0,0F1,,0B0,0B1,0RESHARD,0REDUCE_GRAD\n,1F0,1B0,1F1,1B1,1REDUCE_GRAD\n",  # torch's, of data parallelism
])  # fmt: skip
def test_csv_from_a_spreadsheet_or_torch(text):
    assert Schedule.from_csv(text) == build("1f1b", 2, 2)


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
def test_from_csv_refuses_an_incomplete_schedule(csv, problem):
    with pytest.raises(ValueError, match=problem):
        Schedule.from_csv(csv)
