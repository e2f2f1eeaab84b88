"""`compare` simulates all schedules for the same model on the same ranks, and returns a table and JSON."""

import json

import pytest

from moe_dualpipe.schedule import NAMES, Costs, build, simulate
from moe_dualpipe.schedule.compare import compare
from moe_dualpipe.tools.drawing.tables import comparison_table

COSTS = Costs(F=2, B=5, W=2, FB=6)


def test_schedules_with_eight_stages_equal_deepseeks_table():
    """PP = 8 stages: 1F1B (PP-1)(F+B), ZB1P (PP-1)(F+B-2W), DualPipe(V) (PP/2-1)(FB+B-3W) where B = F + W."""
    F, B, W, FB = 3, 5, 2, 7
    by_name = {}
    for entry in compare(8, 32, Costs(F, B, W, FB)):
        if entry.timeline.schedule.num_stages == 8:
            by_name[entry.name] = entry.as_object()
    expected = {  # bubble, activations, parameters, ranks
        "1f1b": (7 * (F + B), 8, 1, 8),
        "zb1p": (7 * (F + B - 2 * W), 8, 1, 8),
        "dualpipe": (3 * (FB + B - 3 * W), 9, 2, 8),
        "dualpipev": (3 * (FB + B - 3 * W), 9, 2, 4),
    }
    for name, row in expected.items():
        entry = by_name[name]
        assert (max(entry["bubble"]), max(entry["peak_activations"]), max(entry["parameters"])) == row[:3], name
        assert entry["ranks"] == row[3]


def test_memory_is_counted_in_stages_of_the_model():
    on_eight = {e.name: e.as_object() for e in compare(8, 32, COSTS) if e.num_ranks == 8}
    assert on_eight["dualpipev"]["stages"] == 16
    assert max(on_eight["dualpipev"]["peak_activations"]) == 17 / 2
    assert on_eight["dualpipev"]["parameters"] == [1] * 8
    on_four = {e.name: e.as_object() for e in compare(8, 32, COSTS) if e.num_ranks == 4}
    assert on_four["dualpipe"]["parameters"] == [4] * 4
    assert max(on_four["1f1b"]["peak_activations"]) == 4 * 2
    assert on_four["1f1b"]["step_time"] == simulate(build("1f1b", 4, 32), Costs(4, 10, 4)).makespan


def test_the_table():
    lines = comparison_table(compare(8, 32, COSTS)).splitlines()
    assert len({len(line) for line in lines if line}) == 1
    assert lines[0].split("|")[1].strip() == "on 8 ranks"
    cells = [[cell.strip() for cell in line.split("|")] for line in lines[2 : 2 + len(NAMES)]]
    rows = {name: values for _, name, *values, _ in cells}
    assert list(rows) == list(NAMES)
    assert rows["1f1b"] == ["8", "273", "228", "49", "17.9%", "8", "0", "1"]
    assert rows["dualpipe"] == ["8", "214", "208", "11 to 13", "5.7%", "9", "4", "2"]


def test_reasons_why_a_schedule_cannot_run_are_below_the_table():
    text = comparison_table(compare(4, 6, COSTS))
    assert (
        "- dualpipe needs an even number of micro-batches >= 2 x ranks: got 6 for 4 ranks (interleaved_overlap" in text
    )
    entry = next(e for e in compare(4, 6, COSTS) if e.name == "dualpipe")
    assert entry.as_object() == {"schedule": "dualpipe", "ranks": 4, "problem": entry.problem}


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
