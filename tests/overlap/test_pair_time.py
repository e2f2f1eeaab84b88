"""The time of an overlapped pair: bounds, and the order of the engine, which a real pair of chunks records."""

import random
from collections import defaultdict

import pytest
import torch

from moe_dualpipe.expert_parallel import Loopback
from moe_dualpipe.overlap.pair_time import LayerSeconds, pair_seconds
from tests.support.pairs import run_pair, stage

FIELDS = ("attn_f", "mlp_f", "attn_b", "mlp_b", "attn_w", "mlp_w", "dispatch_f", "combine_f", "combine_b", "dispatch_b")


def some_layers(rng, number):
    return [LayerSeconds(**{name: rng.uniform(0.1, 2) for name in FIELDS}) for _ in range(number)]


def recorded(forward, backward):
    """The labels that the engine logs for chunks of so many layers, as on a GPU, without the ends of a block."""

    def bare(layers):
        return stage(layers, 0, Loopback(8, 2), embedding=False, head=False, num_shared_experts=0)

    log: list[str] = []
    hidden = torch.randn(1, 4, 16)
    run_pair(bare(forward), bare(backward), hidden, hidden, True, True, log)
    return [label for label in log if not label.startswith("add")]


def list_schedule(log, forward, backward):
    """Two streams that each run their work in the order of the log, as soon as its input is there."""
    layers, counts = {"F": forward, "B": backward[::-1], "W": backward[::-1]}, defaultdict(int)
    streams, ready = {"compute": 0.0, "transfer": 0.0}, {"F": 0.0, "B": 0.0}
    for label in log:
        name, lane = label[:-3], label[-2]
        layer = layers[lane][counts[label]]
        counts[label] += 1
        key = f"{name}_{lane.lower()}" if name in ("attn", "mlp") else f"{name}_{'f' if lane == 'F' else 'b'}"
        stream = "compute" if name in ("attn", "mlp") else "transfer"
        after = 0.0 if lane == "W" else ready[lane]  # weight gradients need what the host has queued before them
        streams[stream] = max(streams[stream], after) + getattr(layer, key)
        if lane != "W":
            ready[lane] = streams[stream]
    return max(*streams.values(), *ready.values())


@pytest.mark.parametrize("sizes", [(1, 1), (3, 3), (2, 4), (4, 1)])
def test_the_order_is_that_of_the_engine(sizes):
    log = recorded(*sizes)
    rng = random.Random(str(sizes))
    for _ in range(20):
        forward, backward = (some_layers(rng, size) for size in sizes)
        assert pair_seconds(forward, backward) == pytest.approx(list_schedule(log, forward, backward))


def test_computation_beside_transfers_is_slower():
    ones = LayerSeconds(*[1.0] * len(FIELDS))
    assert pair_seconds([ones], [ones], slower=0.25) == 6 + 4 * 0.25  # all 4 transfers are hidden
