"""Training runs of a small model: options, runs in this process or as commands, and their records."""

import contextlib
import dataclasses
import gc
import io
import itertools
import json
import logging
import os
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed.run as torch_launcher
from torch.profiler import ProfilerActivity, profile

import moe_dualpipe
from moe_dualpipe.commands.train import instruments
from moe_dualpipe.models import ModelConfig
from moe_dualpipe.runtime.launch import Launch
from moe_dualpipe.training import OptimizerConfig, TrainConfig, Trainer, resolve
from moe_dualpipe.training.console import Console
from moe_dualpipe.training.loop import train_loop
from moe_dualpipe.training.options import Request, all_keys, parse, value_of
from moe_dualpipe.training.resolve import Run, prepare
from moe_dualpipe.training.restart import Agreed
from moe_dualpipe.training.rules import Given
from tests.support import ranks

ROOT = Path(__file__).parents[2]
all_keys()  # reads the docstrings of options once, and not in each process that is forked

TEXT = str(Path(logging.__file__).parent)  # does not change with this project
MODEL = ModelConfig(
    hidden_size=32, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=16, dense_size=64, expert_size=32,
    num_experts=4, init_std=0.1,
)  # fmt: skip
SHALLOW = dataclasses.replace(MODEL, num_layers=2)
"""A dense layer and one with experts: a layer a stage, with two stages. Runs take half the time of those of MODEL."""


def settings(out, **changes) -> TrainConfig:
    """The options of a small run in the folder `out`. Changes have the names of the flags, without groups."""
    small = TrainConfig(model=SHALLOW, steps=6, optim=OptimizerConfig("adamw", warmup_steps=2))
    default = {
        "seq_len": 32, "micro_batch_size": 1, "batch_size": 4, "eval_sequences": 4, "sample_tokens": 0,
        "data": (TEXT,), "out": str(out),
    }  # fmt: skip
    return change(small, **{**default, **changes})


def change(config: TrainConfig, **changes) -> TrainConfig:
    """Replace some options of `config`. Changes have the names of the flags."""
    groups = ("parallel", "compute", "batch", "checkpoint", "metrics", "sample", "health")
    for name, value in changes.items():
        group = next((group for group in groups if hasattr(getattr(config, group), name)), None)
        new = {name: value} if group is None else {group: dataclasses.replace(getattr(config, group), **{name: value})}
        config = dataclasses.replace(config, **new)
    return config


def option_values(config: TrainConfig) -> dict[str, Any]:
    """The value of every option, by its key."""
    return {key: value_of(config, key) for key in all_keys()}


def options(**changes) -> TrainConfig:
    """The default options with changes, which have the names of the flags."""
    return change(TrainConfig(), **changes)


def make_run(config: TrainConfig | list[str], rank=0, world_size=1, **given) -> Run:
    """The checked run of a configuration, or of a command line. Without a process group, no rank asks the others.

    given: weights, batches and validation in memory.
    """
    request = parse(config) if isinstance(config, list) else Request(config)
    with contextlib.ExitStack() as stack:
        if world_size > 1 and not torch.distributed.is_initialized():
            stack.enter_context(mock.patch.object(resolve, "agree", lambda folder, *_: Agreed(folder)))
        return prepare(request, Launch(rank, rank, world_size, world_size), Given(**given), instruments())


def make_trainer(rank, config, **given) -> Trainer:
    run = make_run(config, rank, torch.distributed.get_world_size(), **given)
    return Trainer(run)


def weights_of(trainer) -> dict[str, torch.Tensor]:
    return {name: tensor for stage in trainer.stages.values() for name, tensor in stage.state_dict().items()}


def equal_tensors(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def note_sequences(trainer) -> dict[int, tuple[int, list]]:
    """By step, the data-parallel rank, and the (inputs, labels) that this rank will read."""
    read, step = {}, trainer.pipeline.step

    def noted(inputs_BS, labels_BS, *arguments, **options):
        if torch.is_grad_enabled():
            rows = [*zip(inputs_BS.tolist(), labels_BS.tolist(), strict=True)]
            read[trainer.progress.step] = trainer.layout.dp_rank, rows
        return step(inputs_BS, labels_BS, *arguments, **options)

    trainer.pipeline.step = noted
    return read


def sequences(reads):
    """The sequences of each step on all data-parallel ranks, in order. All ranks of a pipeline must read the same."""
    found = {}
    for step in reads[0]:
        parts = {}
        for dp_rank, rows in (read[step] for read in reads):
            assert parts.setdefault(dp_rank, rows) == rows
        found[step] = [row for _, rows in sorted(parts.items()) for row in rows]
    return found


def skip_steps(trainer) -> contextlib.AbstractContextManager[object]:
    """From now on, or only in this context, updates are skipped as if gradients were not finite."""
    patch = mock.patch.object(trainer.skipped, "before_update", lambda update: setattr(update, "finite", False))
    patch.start()
    return contextlib.closing(SimpleNamespace(close=patch.stop))


def train(rank, config):
    """Do a run on this rank. Returns the records that rank 0 wrote."""
    trainer = make_trainer(rank, config)
    train_loop(trainer)
    return records(trainer.run.folder)


def train_in_memory(config, *callbacks, **given):
    """The records of a run from Python that prints nothing, and its trainer."""
    found = []
    return found, moe_dualpipe.train(config, callbacks, [SimpleNamespace(log=found.append)], verbose=False, **given)


def train_and_listen(rank, config):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        train(rank, config)
    return printed.getvalue()


def records(out):
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def peak_bytes(function, *arguments):
    """The most bytes that torch's CPU allocator gave out at a time within a call, by its own record; and the result."""
    gc.collect()  # what an earlier run has left would be freed within the call
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = function(*arguments)
    events: Any = recorded.profiler.kineto_results.events()
    sizes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    return max(itertools.accumulate(size for _, size in sorted(sizes, key=lambda one: one[0]))), result


CLOCKS = (
    "seconds", "tokens_per_s", "peak_memory_mb", "reduce_seconds", "reduce_exposed_seconds", "gather_seconds",
    "gather_exposed_seconds",
)  # fmt: skip


def without_clocks(run_records):
    """What two runs with the same results have in common."""
    return [{key: value for key, value in record.items() if key not in CLOCKS} for record in run_records]


def losses(run_records, kind="loss"):
    return {record["step"]: record[kind] for record in run_records if kind in record}


def train_each(rank, configs):
    return ranks.each(rank, train, configs)


def introduction(rank, config):
    """What a run prints about its parameters before it starts."""
    trainer = make_trainer(rank, config)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        Console(trainer.run).introduce(*trainer.count_parameters(), 0.0)
    return out.getvalue()


def torchrun(*arguments, folder) -> subprocess.CompletedProcess[str]:
    """Run torchrun in `folder`. The launcher is forked from a process that has imported torch; the ranks start anew."""
    with tempfile.TemporaryDirectory() as logs:
        files = [Path(logs, name) for name in ("stdout", "stderr")]
        launcher: Any = ranks._context.Process(target=_launch, args=([*map(str, arguments)], folder, *files))
        launcher.start()
        try:
            launcher.join(120)
            assert launcher.exitcode is not None, "torchrun did not end within 120 s"
        finally:
            launcher.terminate()  # ends its processes, too
            launcher.join()
        return subprocess.CompletedProcess(arguments, launcher.exitcode, *(file.read_text() for file in files))


def _launch(arguments, folder, stdout, stderr):
    os.chdir(folder)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in ((1, stdout), (2, stderr)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    torch_launcher.main(arguments)


SMALL = [
    *("--num-layers", 2, "--seq-len", 32, "--batch-size", 4, "--micro-batch-size", 1, "--sample-tokens", 12),
    *("--set", "model.hidden_size=32", "model.head_dim=8", "metrics.eval_sequences=4", "--data", TEXT),
]
