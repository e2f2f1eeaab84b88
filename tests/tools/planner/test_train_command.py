"""Commands of planned runs: train.py accepts them, and what it cannot run has a reason."""

import dataclasses
import shlex

import pytest

from moe_dualpipe.tools.planner.device import load_device
from moe_dualpipe.tools.planner.published_shapes import read_shape
from moe_dualpipe.tools.planner.train_command import missing, train_command
from moe_dualpipe.tools.planner.workload import Workload, layout_of
from moe_dualpipe.training.options import parse_arguments
from tests.support.planned import relaid

BASE = Workload(read_shape("olmoe-1b-7b"), load_device("h100"), layout_of(16, pp=4, ep=4), seq=2048, global_batch=64)


def changed(layout=None, **options):
    return dataclasses.replace(BASE, layout=relaid(BASE.layout, **(layout or {})), **options)


@pytest.mark.parametrize("load", [
    changed(), changed({"vpp": 4}, schedule="interleaved_1f1b"), changed(schedule="dualpipe", overlap=False),
    changed(zero=False, recompute="full"), changed({"gpus": 12, "ep": 1}, global_batch=24),
    changed(layers=(5, 4, 4, 3)),
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
    (changed(overlap=True), "overlap in 1f1b"), (changed({"tp": 2}), "tp 2"), (changed(precision="fp8"), "fp8"),
    (changed({"vpp": 2}, schedule="interleaved_1f1b", global_batch=24), "use 8"),
    (changed({"cp": 2}), "cp 2"), (changed(shape=read_shape("llama3-8b")), "llama3-8b is not a preset"),
])  # fmt: skip
def test_what_train_cannot_run_has_a_reason(load, said):
    assert len(missing(load)) == 1 and not missing(BASE)
    text = train_command(load)
    assert text.startswith("train.py cannot run it: ") and said in text


@pytest.mark.parametrize("gpu,gpus,where", [
    ("h100", 8, "torchrun --nproc-per-node 8 "), ("h100", 12, "torchrun --nnodes 2 --nproc-per-node 6 "),
    ("gb200", 16, "torchrun --nnodes 4 --nproc-per-node 4 "), ("gh200", 8, "torchrun --nnodes 2 --nproc-per-node 4 "),
])  # fmt: skip
def test_machines_have_as_many_gpus_as_are_usual(gpu, gpus, where):
    assert train_command(changed({"gpus": gpus, "ep": 1}, device=load_device(gpu))).startswith(where)
