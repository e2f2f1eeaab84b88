"""Contradictory layouts are refused in one line that names numbers that work; those numbers do work."""

import dataclasses
import re

import pytest

from moe_dualpipe.tools.planner.device import load_device
from moe_dualpipe.tools.planner.published_shapes import read_shape
from moe_dualpipe.tools.planner.workload import Workload, layout_of
from tests.support.planned import relaid

LOAD = Workload(read_shape("qwen3-30b-a3b"), load_device("h100"), layout_of(64, 2, 4, 1, 8), global_batch=256)


def changed(layout=None, **options):
    return dataclasses.replace(LOAD, layout=relaid(LOAD.layout, **(layout or {})), **options)


def test_the_numbers_of_a_layout():
    LOAD.check()
    one = LOAD.layout
    changed({"pp": 50, "gpus": 100, "ep": 1, "tp": 1}, global_batch=100).check()  # 48 layers, and both ends
    assert (one.dp, LOAD.expert_replicas, LOAD.expert_tp) == (8, 2, 1)
    assert (LOAD.num_micro_batches, LOAD.tokens, LOAD.rank_tokens) == (32, 256 * 4096, 2048)
    alone = changed({"ep": 1})
    assert (alone.expert_tp, alone.expert_replicas) == (2, 8)
    assert changed(micro_batch=4).num_micro_batches == 8
    assert one.dp * one.tp * one.pp * one.cp == one.num_ranks


BAD = {
    "gpus": ({"gpus": 63}, {}, "--gpus 63 is not a multiple of tp x pp x cp = 2 x 4 x 1 = 8"),
    "positions": ({"tp": 32, "pp": 1, "ep": 1}, {"seq": 48}, "--tp 32 does not divide --seq-len 48 / --cp 1"),
    "positions of a context": ({"tp": 4, "pp": 1, "ep": 1, "cp": 4}, {"seq": 24},
                               "--tp 4 does not divide --seq-len 24 / --cp 4"),
    "heads": ({"tp": 64, "pp": 1, "ep": 1}, {},
              "--tp 64 does not divide 32 attention heads of qwen3-30b-a3b"),
    "experts": ({"ep": 3, "pp": 1, "tp": 1, "gpus": 96}, {},
                "--ep 3 does not divide 128 experts of a layer"),
    "ranks of a stage": ({"ep": 32}, {},
                         "--ep 32 does not divide 16 ranks of a pipeline stage (64 GPUs / pp 4)"),
    "batch": ({}, {"global_batch": 100},
              "--batch-size 100 is not a multiple of micro-batch x dp = 1 x 8 = 8"),
    "larger batch": ({}, {"global_batch": 103}, "= 1 x 8 = 8"),
    "sequence": ({"cp": 3, "gpus": 96}, {"global_batch": 4}, "--cp 3 does not divide --seq-len 4096"),
    "layers": ({"pp": 64, "gpus": 128, "ep": 1}, {}, "qwen3-30b-a3b has 48 layers, too few for 64 pipeline stages"),
    "chunks": ({"vpp": 2}, {"schedule": "zb1p"}, "--vpp 2 needs --schedule interleaved_1f1b: got zb1p"),
    "precision": ({}, {"precision": "mxfp8"}, "h100 does not support --dtype mxfp8: use bf16, fp8"),
    "fp8 twice": ({}, {"precision": "fp8", "fp8": "experts"}, "--fp8 experts contradicts --dtype: use --fp8 off"),
    "no fp8": ({}, {"device": load_device("a100"), "fp8": "experts"},
               "--fp8 experts needs NVIDIA's Hopper or a later GPU, unlike a100: use --fp8 off"),
    "fp8 without kernels": ({}, {"device": load_device("mi355x"), "fp8": "experts"},
                            "--fp8 experts needs NVIDIA's Hopper or a later GPU, unlike mi355x: use --fp8 off"),
    "micro-batches": ({}, {"schedule": "dualpipe", "global_batch": 48, "micro_batch": 2},
                      "dualpipe needs an even number of micro-batches >= 2 x ranks: got 3 for 4 ranks"),
    "odd": ({}, {"schedule": "dualpipe", "global_batch": 808},
            "dualpipe needs an even number of micro-batches >= 2 x ranks: got 101 for 4 ranks"),
    "stages": ({"pp": 51, "gpus": 102, "ep": 1, "tp": 1}, {"global_batch": 102}, "48 layers, too few for 51 pipeline"),
    "dense": ({}, {"shape": read_shape("llama3-8b")}, "--ep 8: llama3-8b has no experts"),
    "further tokens": ({}, {"shape": dataclasses.replace(LOAD.shape, mtp=2), "seq": 2},
                       "--seq-len 2 is too short for 2 modules of multi-token prediction"),
    "one rank": ({"vpp": 2, "pp": 1}, {"schedule": "interleaved_1f1b"}, "--vpp 2 needs --pp of at least 2: got 1"),
}  # fmt: skip


@pytest.mark.parametrize("layout,options,said", BAD.values(), ids=BAD)
def test_what_cannot_run_is_refused_in_one_line(layout, options, said):
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        changed(layout, **options).check()
    assert "\n" not in str(error.value)
