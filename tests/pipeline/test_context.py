"""Context parallelism: ranks that share sequences compute what one process computes."""

from dataclasses import replace

import pytest

from moe_dualpipe.pipeline.settings import Parallel
from moe_dualpipe.schedule import build
from tests.pipeline.test_padding import COUNT, MODEL, PLAIN, padded, short_batch, update
from tests.support.ranks import run_ranks

MLA = {"attention": "mla", "kv_rank": 16, "q_rank": 12, "rope_dim": 4, "value_dim": 12, "num_kv_heads": 2}
YARN = {"rope_scaling": "yarn", "yarn_factor": 4.0, "rotary_fraction": 0.5}
DYNAMIC = {"rope_scaling": "dynamic", "yarn_factor": 2.0, "yarn_positions": 4}
END = 5


def batch(kind):
    inputs, labels = short_batch()
    if kind == "padded":
        return tuple(tensor[:, :16] for tensor in padded(*short_batch((8, 5, 8, 3, 0, 6, 8, 4)), 9))
    if kind == "unlabeled":
        labels[:, 5] = -100
    return inputs, labels


def on_ranks(_rank, name, pp, parallel, model, kind, options):
    ranks = 2 * max(parallel.cp, parallel.ep) // 2
    schedule = build(name, pp, COUNT // (ranks // parallel.cp) // 2)
    found = update(model, schedule, batch(kind), parallel, **options)
    return {name: tensor.numpy() for name, tensor in found.items()}


CASES = {
    "cp 2": ("1f1b", 1, Parallel(cp=2), {}, "", {}),
    "cp 4": ("1f1b", 1, Parallel(cp=4), {}, "", {}),
    "latent attention": ("1f1b", 1, Parallel(cp=2), MLA, "", {}),
    "YaRN, part of the channels": (
        "1f1b",
        1,
        Parallel(cp=2),
        YARN,
        "",
        {},
    ),
    "dynamic": (
        "1f1b",
        1,
        Parallel(cp=2),
        DYNAMIC,
        "",
        {},
    ),
    "MTP": ("1f1b", 1, Parallel(cp=2), {"mtp_layers": 2}, "", {}),
    "padding and MTP": ("1f1b", 1, Parallel(cp=2), {"mtp_layers": 1}, "padded", {}),
    "labels left out": ("1f1b", 1, Parallel(cp=2), {}, "unlabeled", {}),
    "documents": ("1f1b", 1, Parallel(cp=2), {}, "", {"document_end_id": END}),
    "recompute norms": ("1f1b", 1, Parallel(cp=2), {}, "", {"recompute": "norms"}),
    "recompute attention": ("1f1b", 1, Parallel(cp=2), {}, "", {"recompute": "attention"}),
    "recompute full": ("1f1b", 1, Parallel(cp=2), {}, "", {"recompute": "full"}),
    "fused loss": ("1f1b", 1, Parallel(cp=2), {"mtp_layers": 1}, "", {"fused_loss": True}),
    "dualpipev, ep 2": ("dualpipev", 2, Parallel(cp=2, ep=2), {}, "", {}),
}


@pytest.mark.parametrize(("name", "pp", "parallel", "changes", "kind", "options"), CASES.values(), ids=CASES)
def test_an_update_equals_that_of_one_process(name, pp, parallel, changes, kind, options):
    model = replace(MODEL, **changes)
    expected = update(model, PLAIN, batch(kind), **options)
    for found in run_ranks(pp * parallel.cp, on_ranks, name, pp, parallel, model, kind, options):
        for key, value in found.items():
            want = expected[key].numpy()
            if ".experts." in key and want.shape != value.shape:
                continue
            diff = abs(value - want).max()
            assert diff < 1e-9, (key, diff)
