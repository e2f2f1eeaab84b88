"""`compare` simulates all schedules for the same model on the same ranks, and returns a table and JSON."""

import json

import pytest

from moe_dualpipe.schedule import Costs, build, simulate
from moe_dualpipe.schedule.compare import compare

COSTS = Costs(F=2, B=5, W=2, FB=6)


def test_schedules_with_eight_stages_equal_deepseeks_table():
    """PP = 8 stages: 1F1B (PP-1)(F+B), ZB1P (PP-1)(F+B-2W), DualPipe(V) (PP/2-1)(FB+B-3W) where B = F + W."""
    F, B, W, FB = 3, 5, 2, 7
    entries = [e for e in compare(8, 32, Costs(F, B, W, FB)) if e.timeline.schedule.num_stages == 8]
    rows = {e.name: [max(e.as_object()[key]) for key in ("bubble", "peak_activations", "parameters")] for e in entries}
    expected = {
        "1f1b": [7 * (F + B), 8, 1],
        "zb1p": [7 * (F + B - 2 * W), 8, 1],
        "dualpipe": [3 * (FB + B - 3 * W), 9, 2],
        "dualpipev": [3 * (FB + B - 3 * W), 9, 2],
    }
    assert {name: rows[name] for name in expected} == expected


def test_memory_is_counted_in_stages_of_the_model():
    found = {(e.name, e.num_ranks): e.as_object() for e in compare(8, 32, COSTS)}
    assert max(found["dualpipev", 8]["peak_activations"]) == 17 / 2
    assert found["dualpipev", 8]["parameters"] == [1] * 8 and found["dualpipe", 4]["parameters"] == [4] * 4
    assert max(found["1f1b", 4]["peak_activations"]) == 4 * 2
    assert found["1f1b", 4]["step_time"] == simulate(build("1f1b", 4, 32), Costs(4, 10, 4)).makespan


def test_per_stage_costs_are_merged_and_split_with_the_stages():
    costs = Costs(F=(1, 1, 1, 5), B=(2, 2, 2, 10))
    for entry in compare(4, 8, costs):
        assert sum(entry.timeline.busy) == 8 * 24
        assert json.dumps(entry.as_object())


@pytest.mark.parametrize(
    "arguments,message",
    [
        ((0, 8, COSTS), "a model has at least one stage: got 0; use 1 or more"),
        ((8, 3, COSTS), "no schedule runs with fewer micro-batches than ranks: got 3 for 4 ranks; use at least 4"),
        ((8, 32, COSTS, 1), "interleaved_1f1b needs at least 2 chunks per rank: got 1; use 2"),
        ((8, 32, Costs(F=(1, 2))), "cost F has 2 numbers for 8 stages: give 1 or 8"),
    ],
)
def test_invalid_numbers_are_refused(arguments, message):
    with pytest.raises(ValueError) as error:
        compare(*arguments)
    assert message in str(error.value)
