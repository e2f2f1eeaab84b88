"""Layouts of planned runs: contradictions are refused with numbers that work, and train.py accepts the command."""

import dataclasses
import re
import shlex

import pytest

from moe_dualpipe.tools.planner import Workload, layout_of, load_device, read_shape
from moe_dualpipe.tools.planner.table import missing, train_command
from moe_dualpipe.training.options import parse_arguments
from tests.support.planned import changed

BASE = Workload(read_shape("qwen3-30b-a3b"), load_device("h100"), layout_of(64, 2, 4, 1, 8), global_batch=256)


def test_the_numbers_of_a_layout():
    BASE.check()
    one = BASE.layout
    changed(BASE, {"pp": 50, "gpus": 100, "ep": 1, "tp": 1}, global_batch=100).check()  # 48 layers, and both ends
    assert (one.dp, BASE.expert_replicas, BASE.expert_tp) == (8, 2, 1)
    assert (BASE.num_micro_batches, BASE.tokens, BASE.rank_tokens) == (32, 256 * 4096, 2048)
    alone = changed(BASE, {"ep": 1})
    assert (alone.expert_tp, alone.expert_replicas) == (2, 8)
    assert changed(BASE, micro_batch=4).num_micro_batches == 8
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
    "further tokens": ({}, {"shape": dataclasses.replace(BASE.shape, mtp=2), "seq": 2},
                       "--seq-len 2 is too short for 2 modules of multi-token prediction"),
    "one rank": ({"vpp": 2, "pp": 1}, {"schedule": "interleaved_1f1b"}, "--vpp 2 needs --pp of at least 2: got 1"),
}  # fmt: skip


@pytest.mark.parametrize("layout,options,said", BAD.values(), ids=BAD)
def test_what_cannot_run_is_refused_in_one_line(layout, options, said):
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        changed(BASE, layout, **options).check()
    assert "\n" not in str(error.value)


# ---- Commands: train.py accepts them, and what it cannot run has a reason ----


RUN = Workload(read_shape("olmoe-1b-7b"), load_device("h100"), layout_of(16, pp=4, ep=4), seq=2048, global_batch=64)


@pytest.mark.parametrize("load", [
    RUN, changed(RUN, {"vpp": 4}, schedule="interleaved_1f1b"), changed(RUN, schedule="dualpipe", overlap=False),
    changed(RUN, zero=False, recompute="full"), changed(RUN, {"gpus": 12, "ep": 1}, global_batch=24),
    changed(RUN, layers=(5, 4, 4, 3)),
], ids=["plain", "chunks", "no overlap", "no zero", "12 GPUs", "layers"])  # fmt: skip
def test_train_accepts_the_command_of_the_same_run(load):
    load.check()
    words = shlex.split(train_command(load))
    options = parse_arguments(words[words.index("train.py") + 1 :])
    nodes = int(words[words.index("--nnodes") + 1]) if "--nnodes" in words else 1
    assert nodes * int(words[words.index("--nproc-per-node") + 1]) == load.layout.num_ranks
    assert (options.parallel.schedule, options.parallel.pp, options.parallel.zero) == (load.schedule, 4, load.zero)
    assert options.parallel.num_chunks == (4 if load.layout.chunks == 4 else None)
    assert options.parallel.layers == (",".join(map(str, load.layers)) or None)
    assert options.parallel.overlap == (load.overlap is not False)
    assert (options.batch.batch_size, options.batch.micro_batch_size) == (load.global_batch, load.micro_batch)


@pytest.mark.parametrize("load,said", [
    (changed(RUN, overlap=True), "overlap in 1f1b"), (changed(RUN, {"tp": 2}), "tp 2"),
    (changed(RUN, precision="fp8"), "fp8"),
    (changed(RUN, {"vpp": 2}, schedule="interleaved_1f1b", global_batch=24), "use 8"),
    (changed(RUN, shape=read_shape("llama3-8b")), "llama3-8b is not a preset"),
])  # fmt: skip
def test_what_train_cannot_run_has_a_reason(load, said):
    assert len(missing(load)) == 1 and not missing(RUN)
    text = train_command(load)
    assert text.startswith("train.py cannot run it: ") and said in text


@pytest.mark.parametrize("gpu,gpus,where", [
    ("h100", 8, "torchrun --nproc-per-node 8 "), ("h100", 12, "torchrun --nnodes 2 --nproc-per-node 6 "),
    ("gb200", 16, "torchrun --nnodes 4 --nproc-per-node 4 "), ("gh200", 8, "torchrun --nnodes 2 --nproc-per-node 4 "),
])  # fmt: skip
def test_machines_have_as_many_gpus_as_are_usual(gpu, gpus, where):
    assert train_command(changed(RUN, {"gpus": gpus, "ep": 1}, device=load_device(gpu))).startswith(where)
