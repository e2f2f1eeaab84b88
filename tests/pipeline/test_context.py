"""Ranks that share sequences, documents or experts compute what one process computes, also with padding."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_dualpipe.data.batches import batch_of
from moe_dualpipe.kernels.fp8 import RECIPES
from moe_dualpipe.models.attention import attention_class
from moe_dualpipe.models.context_parallel import Context
from tests.pipeline.test_documents import packed
from tests.pipeline.test_padding import padded, short_batch
from tests.support.ranks import cosine_distance, run_ranks
from tests.support.updates import MODEL, check_layout, in_layout

ROOT = Path(__file__).parents[2]
MLA = {"attention": "mla", "kv_rank": 16, "q_rank": 12, "rope_dim": 4, "value_dim": 12, "num_kv_heads": 2}
YARN = {"rope_scaling": "yarn", "yarn_factor": 4.0, "rotary_fraction": 0.5}
DYNAMIC = {"rope_scaling": "dynamic", "yarn_factor": 2.0, "yarn_positions": 4}
WINDOW = {"attention": f"{ROOT}/examples/layers/sliding_window.py:SlidingWindow", "attention_options": "window=3"}
LENGTHS = 8, 5, 8, 3, 0, 6, 8, 4


def batch(kind):
    inputs, labels = short_batch()
    if kind == "padded":  # one sequence has no label
        return tuple(tensor[:, :16] for tensor in padded(*short_batch(LENGTHS), 9))
    if kind == "packed":
        return packed()
    if kind == "unlabeled":
        labels[:, 5] = -100
    return batch_of(inputs, labels, 5 if kind == "documents" else None)


PADDED = {"kind": "padded", "cp": 1, "size": 1, "model": {"mtp_layers": 1}}
PACKED = {"kind": "packed", "cp": 1, "model": {"mtp_layers": 2}}
CASES = {
    "cp 2": {}, "cp 4": {"cp": 4}, "latent attention": {"model": MLA}, "YaRN, half of the channels": {"model": YARN},
    "dynamic": {"model": DYNAMIC}, "MTP": {"model": {"mtp_layers": 2}},
    "padding and MTP": {"model": {"mtp_layers": 1}, "kind": "padded"}, "labels left out": {"kind": "unlabeled"},
    "sliding window, documents": {"model": WINDOW, "kind": "documents"},
    "sliding window, cp 4": {"model": WINDOW | {"attention_options": "window=2"}, "cp": 4},
    "documents": {"kind": "documents"}, "documents, dualpipev": {"kind": "documents", "name": "dualpipev", "pp": 2},
    "recompute norms": {"recompute": "norms"}, "recompute attention": {"recompute": "attention"},
    "recompute full": {"recompute": "full"}, "fused loss": {"model": {"mtp_layers": 1}, "fused_loss": True},
    "dualpipev, ep 2": {"name": "dualpipev", "pp": 2, "ep": 2}, "dualpipe": {"name": "dualpipe", "pp": 2},
    "short keys, dualpipev, ep 2": {"model": MLA | {"kv_rank": 4}, "name": "dualpipev", "pp": 2, "ep": 2},
    "padding, dualpipev": PADDED | {"name": "dualpipev", "pp": 2}, "padding, ep 2": PADDED | {"dp": 2, "ep": 2},
    "packed": PACKED | {"cp": 2}, "packed, cp 2, dualpipe": PACKED | {"cp": 2, "name": "dualpipe", "pp": 2},
    "packed, dualpipev": PACKED | {"name": "dualpipev", "pp": 2},
    "packed, ep 2": {"kind": "packed", "cp": 1, "dp": 2, "ep": 2},
    "dp 2, ep 4": {"dp": 2, "ep": 4}, "1f1b_overlap, ep 2": {"name": "1f1b_overlap", "pp": 2, "ep": 2},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.quick(
    "cp 4", "sliding window, documents", "latent attention", "dynamic", "padding and MTP", "labels left out",
    "documents, dualpipev", "padding, dualpipev", "padding, ep 2", "packed", "packed, dualpipev", "packed, ep 2",
    "recompute full", "short keys, dualpipev, ep 2", "dp 2, ep 4",
)  # fmt: skip
def test_an_update_equals_that_of_one_process(case):
    """Losses, gradients, loads, router losses and biases, in fp64."""
    given = {"model": {}, "kind": "", "cp": 2} | case
    check_layout(replace(MODEL, **given.pop("model")), batch(given.pop("kind")), **given)


@pytest.mark.parametrize("fp8", [None, RECIPES["ue8m0"]], ids=["fp32", "fp8"])
@pytest.mark.parametrize(("name", "pp", "ep"), [("1f1b", 1, 1), ("dualpipev", 2, 2), ("1f1b_overlap", 2, 1)])
@pytest.mark.quick("1f1b-1-1-fp32", "1f1b-1-1-fp8")
def test_in_fp32_it_is_as_near_as_with_expert_parallelism(name, pp, ep, fp8):
    """The loss within 1e-6, and gradients within 1e-11 cosine distance."""
    for found, expected in in_layout(MODEL, batch(""), name, pp, 1, ep, 2, dtype=torch.float32, fp8=fp8):
        assert found["loss"].item() == pytest.approx(expected["loss"].item(), rel=1e-6)
        for key, value in found.items():
            if key not in ("loss", "loads") and value.ndim > 1:
                assert cosine_distance(value, expected[key]) < 1e-11, key


def sent_for_keys(_rank):
    """What `gather` of a sliding window sends, in the forward and the backward, and the shape of its results."""
    context, sent = Context(dist.group.WORLD), []
    attention = attention_class(replace(MODEL, **WINDOW)).build(replace(MODEL, **WINDOW), layer=0)
    attention.context = context

    def send(received, given, *sizes, **options):
        sent.append(given.numel())
        return original(received, given, *sizes, **options)

    original = dist.all_to_all_single
    with mock.patch.object(dist, "all_to_all_single", send):
        keys = attention.gather.start(*torch.ones(2, 4, 2, 10, 8)).wait()
        grads = attention.gather.dual(*keys).wait()
        with pytest.raises(ValueError, match=r"^window 3 is longer than a slice: use --seq-len 12 or more$"):
            attention.gather.start(*torch.ones(2, 4, 2, 2, 8))
    return sent, [tuple(one.shape) for one in (*keys, *grads)]


def test_a_sliding_window_sends_only_what_its_neighbors_need():
    """2 positions before each slice of 5, of keys and values with 4 x 2 x 8 numbers, to one neighbor or two."""
    each = 2 * 2 * 4 * 2 * 8
    for (sent, shapes), neighbors in zip(run_ranks(3, sent_for_keys), (1, 2, 1), strict=True):
        assert sent == [neighbors * each] * 2
        assert shapes == [(4, 2, 2 * (2 + 5), 8)] * 2 + [(4, 2, 10, 8)] * 2
