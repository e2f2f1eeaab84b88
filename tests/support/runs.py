"""Whole training runs of a small model, for tests: their settings, and what they recorded."""

import contextlib
import dataclasses
import email
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from moe_dualpipe.models import ModelConfig
from moe_dualpipe.runtime.launch import Launch
from moe_dualpipe.training.config import OptimizerConfig, TrainConfig
from moe_dualpipe.training.loop import Trainer
from moe_dualpipe.training.plan import Plan
from moe_dualpipe.training.resolve import resolve

ROOT = Path(__file__).parents[2]


TEXT = str(Path(email.__file__).parent)  # the same whatever this project changes
MODEL = ModelConfig(
    hidden_size=32, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=16, dense_size=64, expert_size=32,
    num_experts=4, init_std=0.1,
)  # fmt: skip


def settings(out, **changes):
    config = TrainConfig(
        model=MODEL, steps=6, seq_len=32, micro_batch_size=1, micro_batches=4, eval_sequences=8, sample_tokens=0,
        data=(TEXT,), optim=OptimizerConfig(warmup_steps=2), out=str(out),
    )  # fmt: skip
    return dataclasses.replace(config, **changes)


def train(rank, config):
    """A whole run on this rank; returns the records that rank 0 wrote."""
    world_size = torch.distributed.get_world_size()
    launch = Launch(rank, rank, world_size, world_size)
    Trainer(Plan.make(resolve(config, launch)), launch).run()
    return records(config.out)


def train_and_listen(rank, config):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        train(rank, config)
    return printed.getvalue()


def records(out):
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def losses(run_records, kind="loss"):
    return {record["step"]: record[kind] for record in run_records if kind in record}


def train_each(rank, configs):
    return [train(rank, config) for config in configs]


def make_trainer(rank, config):
    world_size = torch.distributed.get_world_size()
    launch = Launch(rank, rank, world_size, world_size)
    return Trainer(Plan.make(resolve(config, launch)), launch)


def introduction(rank, config):
    trainer = make_trainer(rank, config)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        trainer._introduce()
    return out.getvalue()


def command(*arguments, processes=1, script="train.py"):
    program = [sys.executable]
    if processes > 1:
        program += ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*program, script, *map(str, arguments)], cwd=ROOT, env=environment, capture_output=True, text=True,
        timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip


SMALL = [
    *("--model.hidden-size", 32, "--model.num-layers", 2, "--model.head-dim", 8, "--seq-len", 32),
    *("--micro-batches", 4, "--micro-batch-size", 1, "--eval-sequences", 8, "--sample-tokens", 12),
    *("--data", TEXT),
]
