"""The order in which the engine runs the segments of two chunks, and the time that this order takes."""

import random
from collections import defaultdict
from functools import partial

import pytest
import torch

from moe_dualpipe.expert_parallel import Local, Loopback
from moe_dualpipe.models.context_parallel import LoopbackContext, transfers_at_first
from moe_dualpipe.overlap import Compute, Engine, WeightGrads, bind
from moe_dualpipe.overlap.pair_time import LayerSeconds, pair_seconds
from tests.support.engines import run_on
from tests.support.pairs import assert_same, run_pair, stage, tokens
from tests.support.segments import module_of

LAYER = "attn(F) mlp(B) dispatch(F) dispatch(B) mlp(W) mlp(F) attn(B) attn(W) combine(F)"


EAGER_LAYER = "attn(F) dispatch(F) mlp(B) dispatch(B) mlp(W) mlp(F) combine(F) attn(B)"


def order(first, second, queued):
    log = []
    hidden = torch.randn(1, 4, 16)
    x0, x1 = (tokens(1) if module.spec.embedding else hidden for module in (first, second))
    run_pair(first, second, x0, x1, True, queued, log)
    return " ".join(log)


def bare(layers, ep=None):
    return stage(layers, 0, ep or Loopback(8, 2), embedding=False, head=False, num_shared_experts=0)


def with_keys(layers, dense=0, ranks=8):
    """Rows of 16 numbers go to 2 ranks, and keys of 16 numbers to 1: behind qkv. To 1 rank: keys behind attention."""
    experts = Loopback(8, ranks)
    return stage(
        layers, dense, experts, embedding=False, head=False, num_shared_experts=0, context=LoopbackContext(2, experts)
    )


with_long_keys = partial(with_keys, ranks=2)
alone, with_head = partial(bare, ep=Local(8)), partial(stage, dense=0, embedding=False)
KEYS_LAYER = LAYER.replace("attn(B) attn(W) combine(F)", "attn(B) combine(F) keys(B) attn(W)")
NEXT = "qkv(F) qkv(B) keys(F) combine(B) qkv(W)"
LONG_LAYER = "mlp(W) qkv(F) attn(B) keys(F) keys(B) attn(W) attn(F) qkv(B) dispatch(F)"
LONG_NEXT = "combine(B) qkv(W) mlp(F) mlp(B) combine(F) dispatch(B)"
# The chunks that run forward and backward, their layers, whether their work is queued as on a GPU, and the order.
ORDERS = {
    # Layer by layer, as in the annotations of DeepSeek's published training trace.
    "the order is DeepSeek's": (
        bare, 3, 3, True, f"add(B) combine(B) {LAYER} combine(B) {LAYER} combine(B) {LAYER} add(F)",
    ),
    "with keys it is DeepSeek's, and keys run behind qkv": (
        with_keys, 3, 3, True,
        f"add(B) combine(B) qkv(F) keys(F) {KEYS_LAYER} {NEXT} {KEYS_LAYER} {NEXT} {KEYS_LAYER} "
        "add(F) qkv(B) qkv(W)",
    ),
    # Layer by layer, by the same rule; the forward begins one transfer later than without keys.
    "long keys run behind the attention of the other chunk": (
        with_long_keys, 3, 3, True,
        f"add(B) combine(B) mlp(B) dispatch(B) {LONG_LAYER} {LONG_NEXT} {LONG_LAYER} {LONG_NEXT} {LONG_LAYER} "
        "qkv(W) mlp(F) combine(F) add(F)",
    ),
    "on a CPU transfers start as soon as their input exists": (
        bare, 2, 2, False, f"add(B) combine(B) {EAGER_LAYER} combine(B) attn(W) {EAGER_LAYER} attn(W) add(F)",
    ),
    # Without expert parallelism, so that the gradient of the backward can be sent.
    "with completed transfers the backward runs first": (
        alone, 2, 1, False,
        "add(B) combine(B) mlp(B) dispatch(B) mlp(W) attn(B) attn(W) "
        "attn(F) dispatch(F) mlp(F) combine(F) attn(F) dispatch(F) mlp(F) combine(F) add(F)",
    ),
    "a longer backward continues alone": (
        bare, 1, 2, True, f"add(B) combine(B) {LAYER} combine(B) add(F) mlp(B) dispatch(B) mlp(W) attn(B) attn(W)",
    ),
    "a longer forward continues alone": (
        bare, 2, 1, True, f"add(B) combine(B) {LAYER} attn(F) dispatch(F) mlp(F) combine(F) add(F)",
    ),
    "weight gradients of the head run in the first transfer, and shared experts in the others": (
        with_head, 1, 1, True,
        "loss(B) head(B) combine(B) head(W) attn(F) mlp(B) mlp(B) dispatch(F) dispatch(B) mlp(W) mlp(W) mlp(F) mlp(F) "
        "attn(B) attn(W) combine(F) head(F) loss(F)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("chunk", "forward", "backward", "queued", "expected"), ORDERS.values(), ids=ORDERS)
def test_the_order_of_segments(chunk, forward, backward, queued, expected):
    assert order(chunk(forward), chunk(backward), queued) == expected


@pytest.mark.parametrize(("cp", "keys", "hidden", "top_k", "ep", "opens"), [
    (1, 1024, 2048, 8, 8, 1), (4, 1024, 2048, 8, 8, 2), (8, 576, 7168, 8, 64, 2),  # Qwen3-30B-A3B, DeepSeek-V3
    (4, 4096, 2048, 8, 8, 0), (4, 1024, 2048, 8, 1, 0), (3, 4, 8, 4, 3, 2), (3, 5, 8, 4, 3, 0),  # OLMoE-1B-7B; no ep
])  # fmt: skip
def test_keys_of_more_than_half_a_dispatch_run_behind_attention(cp, keys, hidden, top_k, ep, opens):
    assert transfers_at_first(cp, keys, hidden, top_k, ep) == opens


@pytest.mark.parametrize("queued", [True, False])
@pytest.mark.parametrize("layers", [(2, 2), (1, 3), (3, 1)])
@pytest.mark.parametrize("chunk", [with_keys, with_long_keys], ids=["keys", "long keys"])
def test_a_pair_with_keys_has_the_bits_of_both_chunks_alone(chunk, layers, queued):
    first, second = map(chunk, layers)
    x0, x1 = torch.randn(2, 1, 4, 16, generator=torch.Generator().manual_seed(1))
    pairs = [run_pair(first, second, x0, x1, overlapped, queued) for overlapped in (True, False)]
    assert_same(*pairs)


@pytest.mark.parametrize("queued", [True, False])
@pytest.mark.parametrize("layers", [(2, 2), (1, 3), (3, 1)])
def test_late_weight_gradients_follow_the_other_chunks_mlp_and_have_the_same_bits(layers, queued):
    logs, results = ([], []), []
    for log, late in zip(logs, (False, True), strict=True):
        first, second = (bare(count) for count in layers)
        bind(second, WeightGrads(late=late))
        x0, x1 = torch.randn(2, 1, 4, 16, generator=torch.Generator().manual_seed(1))
        results.append(run_pair(first, second, x0, x1, True, queued, log))
    early, late = (" ".join(log) for log in logs)
    combine = "" if queued else " combine(F)"  # also started before mlp(W)
    pairs = min(layers)
    assert early.count(f"mlp(W) mlp(F){combine}") == late.count(f"mlp(F){combine} mlp(W)") == pairs
    assert early.replace(f"mlp(W) mlp(F){combine}", f"mlp(F){combine} mlp(W)") == late
    assert_same(results[1], results[0])


def test_the_backward_runs_segments_in_the_reverse_order_of_the_forward():
    def segments(_self, x):
        a = yield Compute("a", torch.sin, x)
        b = yield Compute("b", torch.sin, x)
        return b, (yield Compute("c", torch.sin, a))

    engine = Engine(torch.device("cpu"), log=[])
    with run_on(engine):
        torch.cat(module_of(segments)(torch.ones(1, requires_grad=True))).sum().backward()
    assert engine.log == ["a(F)", "b(F)", "c(F)", "c(B)", "b(B)", "a(B)"]


# ---- Time ----


PARTS = "qkv", "attn", "mlp"
EXPERTS = "dispatch_f", "combine_f", "combine_b", "dispatch_b"
FIELDS = ("attn_f", "mlp_f", "attn_b", "mlp_b", "attn_w", "mlp_w", *EXPERTS)
KEYS_FIELDS = (*FIELDS, "qkv_f", "qkv_b", "qkv_w", "keys_f", "keys_b")


def list_schedule(log, forward, backward):
    """Two streams that each run their work in the order of the log, as soon as its input is there."""
    layers, counts = {"F": forward, "B": backward[::-1], "W": backward[::-1]}, defaultdict(int)
    streams, ready = {"compute": 0.0, "transfer": 0.0}, {"F": 0.0, "B": 0.0}
    for label in log:
        name, lane = label[:-3], label[-2]
        times = [time for layer in layers[lane] if (time := getattr(layer, f"{name}_{lane.lower()}"))]
        stream = "compute" if name in PARTS else "transfer"
        after = 0.0 if lane == "W" else ready[lane]  # weight gradients need what the host has queued before them
        streams[stream] = max(streams[stream], after) + times[counts[label]]
        counts[label] += 1
        if lane != "W":
            ready[lane] = streams[stream]
    return max(*streams.values(), *ready.values())


@pytest.mark.parametrize("sizes", [(1, 1), (3, 3), (2, 4), (4, 1)])
@pytest.mark.parametrize(("chunk", "opens", "dense"), [
    (bare, 1, 0), (with_keys, 2, 0), (partial(with_keys, dense=1), 2, 1), (with_long_keys, 0, 0),
    (partial(with_long_keys, dense=1), 0, 1),
], ids=["experts", "keys", "keys, first layer dense", "long keys", "long keys, first layer dense"])  # fmt: skip
def test_the_order_is_that_of_the_engine(chunk, opens, dense, sizes):
    log = [label for label in order(*map(chunk, sizes), queued=True).split() if not label.startswith("add")]
    rng, fields = random.Random(str(sizes)), FIELDS if opens == 1 else KEYS_FIELDS
    for _ in range(20):
        forward, backward = (
            [
                LayerSeconds(**{name: rng.uniform(0.1, 2) * (layer >= dense or name not in EXPERTS) for name in fields})
                for layer in range(size)
            ]
            for size in sizes
        )
        assert pair_seconds(forward, backward, opens=opens) == pytest.approx(list_schedule(log, forward, backward))


def test_computation_beside_transfers_is_slower():
    ones = LayerSeconds(*[1.0] * len(FIELDS))
    assert pair_seconds([ones], [ones], slower=0.25) == 6 + 4 * 0.25  # all 4 transfers are hidden
