"""Measured loads of experts and memory: equal loads change nothing, and one rank of an expert group is the fullest."""

import dataclasses
import random

import pytest

from moe_dualpipe.expert_parallel.exchange import ROW_ALIGNMENT, buffer_rows, round_up
from moe_dualpipe.tools.planner import MicroBatch, Workload, layout_of, load_device, peak_memory, read_shape
from moe_dualpipe.tools.planner.activations import choices_received, deferred_bytes, rows_received, saved_bytes
from moe_dualpipe.tools.planner.backward_memory import mlp_working
from moe_dualpipe.tools.planner.measured_loads import MeasuredLoads
from moe_dualpipe.tools.planner.peak import config_of, stages_of
from moe_dualpipe.tools.planner.workload_memory import full_schedule, memory_of

BASE = Workload(read_shape("qwen3-30b-a3b"), load_device("h100"), layout_of(32, 1, 4, 1, 8), global_batch=256)
LAYERS, EXPERTS, RANKS = 48, 128, 8
CONFIG = config_of(BASE.shape)


def with_loads(rows, **options):
    loads = MeasuredLoads("loads.json", tuple(range(len(rows))), tuple(map(tuple, rows)))
    return dataclasses.replace(BASE, loads=loads, **options)


def of_ranks(rows):
    """Loads in which the experts of a rank have equal shares. rows: for each layer, the load of each of 8 ranks."""
    return [[load for load in row for _ in range(EXPERTS // RANKS)] for row in rows]


def uneven(seed=0):
    choose = random.Random(seed)
    return [[choose.randint(1, 40) for _ in range(RANKS)] for _ in range(LAYERS)]


@pytest.mark.parametrize("number", [7, 0.1, 10**12])
@pytest.mark.parametrize("options", [
    {}, {"schedule": "dualpipe"}, {"schedule": "zb1p", "recompute": "full"}, {"precision": "fp8"},
], ids=str)  # fmt: skip
def test_equal_loads_need_exactly_what_even_routing_needs(number, options):
    assert memory_of(with_loads([[number] * EXPERTS] * LAYERS, **options)) == memory_of(
        dataclasses.replace(BASE, **options)
    )


def test_without_expert_parallelism_loads_change_nothing():
    alone = dataclasses.replace(BASE, layout=layout_of(32, 1, 4))
    assert memory_of(dataclasses.replace(with_loads(of_ranks(uneven())), layout=alone.layout)) == memory_of(alone)


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p", "gpipe"])
def test_the_fullest_rank_is_the_one_that_needs_the_most(schedule):
    """Against each rank of the expert group, with its own loads in all layers."""
    rows = uneven()
    load = with_loads(of_ranks(rows), schedule=schedule)
    relative = [tuple(row[rank] * RANKS / sum(row) for row in rows) for rank in range(RANKS)]
    each = [
        peak_memory(load.shape, full_schedule(schedule, 4, 32), MicroBatch(1, 4096, ep=RANKS, loads=own), 8,
                    stages=stages_of(load.shape, 4))
        for own in relative
    ]  # fmt: skip
    expected = max(rank.total for ranks in each for rank in ranks)
    assert memory_of(load).total == expected > memory_of(BASE).total
    assert len({max(rank.total for rank in ranks) for ranks in each}) > 1


def test_a_rank_that_is_full_in_every_layer_needs_more_than_ranks_that_take_turns():
    """Each layer has the same fullest load, so the times are equal; the memory is not."""
    turns = [[10] * RANKS for _ in range(LAYERS)]
    same = [[13, *[10] * (RANKS - 1)] for _ in range(LAYERS)]
    for layer, row in enumerate(turns):
        row[layer % RANKS] = 13
    needed = [memory_of(with_loads(of_ranks(rows))).activations for rows in ([[1] * RANKS] * LAYERS, turns, same)]
    assert needed == sorted(needed) and len({*needed}) == 3


def test_rows_and_choices_of_a_full_rank():
    def received(load):
        batch = MicroBatch(1, 1000, ep=RANKS, loads=(1.0, load))
        return rows_received(CONFIG, batch, 1), choices_received(CONFIG, batch, 1)

    even = received(1.0)
    assert even == (rows_received(CONFIG, MicroBatch(1, 1000, ep=RANKS)), 8 * 1000)
    assert received(0.5) == (pytest.approx(even[0] / 2, abs=1), 4000)
    assert received(1.2) == (pytest.approx(even[0] * 1.2, abs=1), 9600)
    assert received(8.0) == (RANKS * 1000, 64_000)  # a token is sent to a rank at most once


def test_only_the_experts_of_the_layer_with_the_load_need_more():
    """By hand, in bf16: a further choice saves z of two inner widths, its indices and its place in the order."""
    spec = stages_of(BASE.shape, 4)[1]
    even = MicroBatch(1, 4096, ep=RANKS)
    full = dataclasses.replace(even, loads=tuple(1.5 if layer == spec.layers[2] else 1.0 for layer in range(LAYERS)))
    outside = dataclasses.replace(even, loads=tuple(1.0 if layer in spec.layers else 9.0 for layer in range(LAYERS)))
    assert saved_bytes(CONFIG, spec, outside) == saved_bytes(CONFIG, spec, even)
    assert deferred_bytes(CONFIG, spec, outside) == deferred_bytes(CONFIG, spec, even)
    choices = choices_received(CONFIG, even, 0) // 2
    received = [rows_received(CONFIG, batch, spec.layers[2]) for batch in (even, full)]
    rows, buffer = received[1] - received[0], buffer_rows(received[1]) - buffer_rows(received[0])
    more = saved_bytes(CONFIG, spec, full) - saved_bytes(CONFIG, spec, even)
    message = round_up(2 * 2048 + 2 * 32, ROW_ALIGNMENT)  # a row, and weights and numbers of 8 experts
    assert more == choices * (2 * 2 * 768 + 8) + rows * (2 * 4 * 8) + buffer * message
    deferred = deferred_bytes(CONFIG, spec, full) - deferred_bytes(CONFIG, spec, even)
    assert deferred == choices * (2 * 3 * 768 + 8) + rows * (2 * 2 * 2048 + 4 * 8)
    working = [mlp_working(CONFIG, spec.layers[2], batch) for batch in (even, full)]
    assert working == [4096 * (2 * k + 1) * 2048 * 2 for k in (8, 12)]


def test_blocks_of_multi_token_prediction_are_like_the_last_layer():
    shape = dataclasses.replace(BASE.shape, mtp=1)
    rows = [[1] * RANKS for _ in range(LAYERS)]
    layout, saved = layout_of(8, ep=RANKS), []
    for number, more in ((1, 0), (1, 1), (2, 0), (2, 1)):
        rows[-1][3] = number
        load = with_loads(of_ranks(rows), shape=dataclasses.replace(shape, mtp=more), layout=layout)
        saved.append(memory_of(load).activations)
    assert saved[3] - saved[1] == 2 * (saved[2] - saved[0]) > 0
