"""Measured loads of experts and memory: the rank that gets the most over all layers is the fullest."""

import dataclasses
import random

import pytest
from moe_dualpipe.tools.planner.backward_memory import mlp_working
from moe_dualpipe.tools.planner.workload_memory import full_schedule, memory_of

from moe_dualpipe.expert_parallel.exchange import ROW_ALIGNMENT, buffer_rows, round_up
from moe_dualpipe.tools.planner import MicroBatch, Workload, layout_of, load_device, peak_memory, read_shape
from moe_dualpipe.tools.planner.activations import choices_received, deferred_bytes, rows_received, saved_bytes
from moe_dualpipe.tools.planner.measured_loads import MeasuredLoads
from moe_dualpipe.tools.planner.peak import config_of, stages_of

BASE = Workload(read_shape("qwen3-30b-a3b"), load_device("h100"), layout_of(32, 1, 4, 1, 8), global_batch=256)
LAYERS, EXPERTS, RANKS = 48, 128, 8
CONFIG = config_of(BASE.shape)


def with_loads(rows, **options):
    """rows: for each layer, the load of each of 8 ranks, whose experts have equal shares."""
    experts = [tuple(load for load in row for _ in range(EXPERTS // RANKS)) for row in rows]
    return dataclasses.replace(
        BASE, loads=MeasuredLoads("loads.json", tuple(range(len(rows))), tuple(experts)), **options
    )


@pytest.mark.parametrize("options", [{}, {"schedule": "zb1p", "recompute": "full"}, {"precision": "fp8"}], ids=str)
def test_equal_loads_need_what_even_routing_needs_and_without_expert_parallelism_all_do(options):
    even = dataclasses.replace(BASE, **options)
    assert memory_of(with_loads([[7] * RANKS] * LAYERS, **options)) == memory_of(even)
    alone, uneven = layout_of(32, 1, 4), [[9, *[1] * (RANKS - 1)]] * LAYERS
    assert memory_of(with_loads(uneven, layout=alone, **options)) == memory_of(dataclasses.replace(even, layout=alone))


def test_the_fullest_rank_is_the_one_that_gets_the_most_over_all_layers():
    choose = random.Random(0)
    rows = [[choose.randint(1, 40) for _ in range(RANKS)] for _ in range(LAYERS)]
    most = max(sum(row[rank] * RANKS / sum(row) for row in rows) / LAYERS for rank in range(RANKS))
    batch = MicroBatch(1, 4096, ep=RANKS, load=most)
    schedule, stages = full_schedule("1f1b", 4, 32), stages_of(BASE.shape, 4)
    expected = max(rank.total for rank in peak_memory(BASE.shape, schedule, batch, 8, stages=stages))
    assert expected > memory_of(BASE).total and memory_of(with_loads(rows)).total == pytest.approx(expected, rel=1e-9)
    # Ranks that take turns are no fuller than others, although each layer has a fullest one.
    turns = [[13 if rank == layer % RANKS else 10 for rank in range(RANKS)] for layer in range(LAYERS)]
    assert memory_of(with_loads(turns)).total == pytest.approx(memory_of(BASE).total, rel=1e-9)


def test_what_a_full_rank_holds():
    """By hand, in bf16: a further choice saves z of two inner widths, its indices and its place in the order."""
    spec, even = stages_of(BASE.shape, 4)[1], MicroBatch(1, 4096, ep=RANKS)
    full, layers = dataclasses.replace(even, load=1.25), len(spec.layers)
    choices = choices_received(CONFIG, full) - choices_received(CONFIG, even)
    received = [rows_received(CONFIG, batch) for batch in (even, full)]
    rows, buffer = received[1] - received[0], buffer_rows(received[1]) - buffer_rows(received[0])
    assert (choices, received[1]) == (4096 * 2, pytest.approx(1.25 * received[0], rel=2e-3))
    assert rows_received(CONFIG, dataclasses.replace(even, load=8.0)) == RANKS * 4096  # a token goes to a rank once
    more = saved_bytes(CONFIG, spec, full) - saved_bytes(CONFIG, spec, even)
    message = round_up(2 * 2048 + 2 * 32, ROW_ALIGNMENT)  # a row, and weights and numbers of 8 experts
    assert more == layers * (choices * (2 * 2 * 768 + 8) + rows * (2 * 4 * 8) + buffer * message)
    deferred = deferred_bytes(CONFIG, spec, full) - deferred_bytes(CONFIG, spec, even)
    assert deferred == layers * (choices * (2 * 3 * 768 + 8) + rows * (2 * 2 * 2048 + 4 * 8))
    working = [mlp_working(CONFIG, spec.layers[2], batch) for batch in (even, full)]
    assert working == [4096 * (2 * k + 1) * 2048 * 2 for k in (8, 10)]
