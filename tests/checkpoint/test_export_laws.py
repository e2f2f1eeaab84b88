"""Laws of exports: the same files however the writers are divided, all or nothing."""

import dataclasses
import errno
import math
import re
import shutil

import pytest
import torch

from moe_dualpipe.checkpoint import find_checkpoint
from moe_dualpipe.checkpoint.huggingface import plan_checkpoint_export
from moe_dualpipe.cli import main
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, settings, train

DEEPSEEK = dataclasses.replace(
    MODEL, attention="mla", head_dim=12, rope_dim=6, value_dim=10, kv_rank=14, q_rank=10, router_score="sigmoid",
    router_bias=True, router_dtype="float32", mtp_layers=1, routed_scale=1.3,
)  # fmt: skip
SMALL = {"seq_len": 16, "eval_sequences": 1}


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def export(run, out, *options):
    return main(["export", str(run), "--out", str(out), *options])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = tmp_path_factory.mktemp("deepseek") / "run"
    run_ranks(2, train, settings(run, model=DEEPSEEK, steps=1, **SMALL))
    return run


# ---- Laws ----


def write_together(rank, checkpoint, out, size, failing=None):
    """Write on all ranks. failing: the rank that cannot read a tensor. Returns the error, or ""."""
    plan, count = plan_checkpoint_export(checkpoint), 0

    def read(name):
        nonlocal count
        count += 1
        if rank == failing and count > 5:
            raise OSError(errno.EIO, "Input/output error", "tensors")
        return plan.read(name)

    try:
        dataclasses.replace(plan, read=read).write(out, size)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def write_in_turn(rank, checkpoint, folder):
    """A write that fails on rank 1, two that do not, and one into a folder that is there."""
    attempts = [("60KB", "failed", 1), ("60KB", "shards", None), ("5GB", "whole", None), ("60KB", "shards", None)]
    return [write_together(rank, checkpoint, folder / out, size, failing) for size, out, failing in attempts]


def test_ranks_that_write_together_write_the_files_of_one_or_nothing(run, tmp_path):
    errors = run_ranks(2, write_in_turn, find_checkpoint(str(run)), tmp_path)
    failed = "rank 1: [Errno 5] Input/output error: 'tensors'"
    assert errors == [[failed, "", "", f"rank 0: {tmp_path}/shards already exists: choose another folder"]] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"shards", "whole"}
    for name, size in (("shards", "60KB"), ("whole", "5GB")):
        assert export(run, tmp_path / "one", "--max-shard-size", size) == 0
        assert contents(tmp_path / name) == contents(tmp_path / "one")
        assert len([*(tmp_path / name).glob("*.safetensors")]) > 5 or name == "whole"
        shutil.rmtree(tmp_path / "one")


# ---- All or nothing ----


@pytest.mark.parametrize("dtype,value,problem", [
    ("float32", math.nan, "holds a NaN or infinity"), ("bfloat16", -math.inf, "holds a NaN or infinity"),
    ("float16", -7e4, "holds 7e+04, and torch.float16 at most 6.55e+04: choose another dtype"),
    ("bfloat16", 3.4e38, "holds 3.4e+38, and torch.bfloat16 at most 3.39e+38"),
])  # fmt: skip
def test_a_weight_that_is_not_finite_in_its_dtype_is_refused_by_name(run, tmp_path, dtype, value, problem):
    plan = plan_checkpoint_export(find_checkpoint(str(run)), getattr(torch, dtype))
    for target in [*plan.layout.targets()][::7]:
        part = target.parts[-1]

        def read(name, wrong=target.name, row=-part.shape[0]):
            tensor = plan.read(name).clone()
            if name == wrong:
                tensor.view(len(tensor), -1)[row, 0] = value
            return tensor

        if plan.shapes[part.name][0] == getattr(torch, dtype):  # the bias of a router stays in fp32
            with pytest.raises(ValueError, match=re.escape(f"{part.name} {problem}")):
                dataclasses.replace(plan, read=read).write(tmp_path / "out")
    assert not [*tmp_path.iterdir()]
