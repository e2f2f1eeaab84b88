"""Commands of planned runs: train.py accepts them, and what it cannot run has a reason."""

import dataclasses
import shlex

import pytest

from moe_dualpipe.planner.device import load_device
from moe_dualpipe.planner.published_shapes import read_shape
from moe_dualpipe.planner.train_command import train_command
from moe_dualpipe.planner.workload import Division, Workload
from moe_dualpipe.training.command_line import parse_arguments

BASE = Workload(read_shape("olmoe-1b-7b"), load_device("h100"), Division(16, pp=4, ep=4), seq=2048, global_batch=64)


def changed(division=None, **options):
    return dataclasses.replace(BASE, division=dataclasses.replace(BASE.division, **(division or {})), **options)


@pytest.mark.parametrize("load", [
    changed(), changed({"vpp": 4}, schedule="interleaved_1f1b"), changed(schedule="dualpipe", overlap=False),
    changed(zero=False, recompute="full"), changed({"gpus": 12, "ep": 1}, global_batch=24),
], ids=["plain", "chunks", "no overlap", "no zero", "12 GPUs"])  # fmt: skip
def test_train_accepts_the_command_of_the_same_run(load):
    load.check()
    words = shlex.split(train_command(load))
    options = parse_arguments(words[words.index("train.py") + 1 :])
    nodes = int(words[words.index("--nnodes") + 1]) if "--nnodes" in words else 1
    assert nodes * int(words[words.index("--nproc-per-node") + 1]) == load.division.gpus
    assert (options.parallel.schedule, options.parallel.pp, options.parallel.zero) == (load.schedule, 4, load.zero)
    assert options.parallel.num_chunks == (4 if load.division.vpp == 4 else None)
    assert options.parallel.overlap == (load.overlap is not False)
    assert options.batch.micro_batches == load.num_micro_batches


@pytest.mark.parametrize("load,said", [
    (changed(overlap=True), "overlap in 1f1b"), (changed({"tp": 2}), "tp 2"), (changed(precision="fp8"), "fp8"),
    (changed({"vpp": 2}, schedule="interleaved_1f1b", global_batch=24), "use 8"),
])  # fmt: skip
def test_what_train_cannot_run_has_a_reason(load, said):
    text = train_command(load)
    assert text.startswith("train.py cannot run it: ") and said in text
