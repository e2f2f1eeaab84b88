"""Measure how the start of a run and the bookkeeping of a step grow with the number of ranks, up to 4,096.

    python -m benchmarks.scale                       a minute
    python -m benchmarks.scale --worlds 64 16384

One rank runs the real code of a training run: process groups, checks between ranks, a tiny model, its optimizer and
steps. The other ranks are not there: each group answers as if they had sent what this rank sends. So times are those of
this rank's own work, without waits. Each size has a process of its own. Pipelines have 4 ranks, and 8 share experts.

The second table counts what gloo does to connect real groups of a few ranks, which are threads of one process.
"""

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import tyro

from benchmarks.common import table

STEPS = 5


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    worlds: tuple[int, ...] = (64, 256, 1024, 4096)
    """Numbers of ranks: multiples of 32."""
    groups: tuple[int, ...] = (8, 16, 32)
    """Sizes of the real groups."""
    one_world: int = 0
    """Measure only this number of ranks, and print the result as JSON."""
    one_group: int = 0
    """Measure only a real group of this size, and print the result as JSON."""


def measure_rank(ranks: int) -> dict[str, float]:
    """Build a run as one rank of `ranks`, and do steps. Returns seconds, MiB, and numbers of groups."""
    from moe_dualpipe.runtime.launch import Launch
    from moe_dualpipe.training.config import BatchConfig, ParallelConfig, TrainConfig
    from moe_dualpipe.training.options import Request
    from moe_dualpipe.training.resolve import prepare
    from moe_dualpipe.training.step import Trainer
    from tests.machines.recording_group import recording_world

    config = TrainConfig(
        model=small_model(), steps=STEPS, batch=BatchConfig(batch_size=2 * ranks, micro_batch_size=1, seq_len=16),
        parallel=ParallelConfig(pp=4, ep=8, ep_backend="all_to_all"),
    )  # fmt: skip
    launch = Launch(0, 0, ranks, 1)
    groups = count_calls(dist, "new_group")
    with recording_world(0, ranks):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        trainer = Trainer(prepare(Request(config), launch, from_command=False))
        built = time.perf_counter()
        trainer.step(0)
        seconds = []
        for step in range(1, STEPS):
            begin = time.perf_counter()
            trainer.step(step)
            seconds.append(time.perf_counter() - begin)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        member = len(dist.distributed_c10d._world.pg_names)
    return {
        "ranks": ranks, "start": built - start, "step": min(seconds), "memory": memory / 1024, "member": member,
        "calls": groups["new_group"],
    }  # fmt: skip


def small_model() -> Any:
    from moe_dualpipe.models import ModelConfig

    return ModelConfig(
        num_layers=4, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, dense_size=16, expert_size=8
    )


def count_calls(module: Any, name: str) -> Counter[str]:
    counts, function = Counter(), getattr(module, name)

    def counted(*args: Any, **named: Any) -> Any:
        counts[name] += 1
        return function(*args, **named)

    setattr(module, name, counted)
    return counts


class CountingStore(dist.Store):
    """A store that counts its operations."""

    def __init__(self) -> None:
        super().__init__()
        self.store, self.operations, self.lock = dist.HashStore(), 0, threading.Lock()

    def _count(self) -> None:
        with self.lock:
            self.operations += 1

    def set(self, key: str, value: Any) -> None:
        self._count()
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        self._count()
        return self.store.get(key)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        self._count()
        self.store.wait(keys, timeout)

    def add(self, key: str, amount: int) -> int:
        self._count()
        return self.store.add(key, amount)


def connect_gloo(size: int) -> dict[str, float]:
    """Connect a real group, and sum a tensor. Returns store operations and open files per rank."""
    store, files = CountingStore(), len(os.listdir("/proc/self/fd"))
    groups: list[Any] = [None] * size

    def rank(r: int) -> None:
        groups[r] = dist.ProcessGroupGloo(store, r, size, timedelta(seconds=60))
        groups[r].allreduce([torch.ones(3)]).wait()

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return {"operations": store.operations / size, "files": (len(os.listdir("/proc/self/fd")) - files) / size}


def measured(option: str, size: int, **environment: str) -> dict[str, float]:
    """The result of this benchmark with one size, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scale", option, str(size)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    if options.one_world or options.one_group:
        print(json.dumps(measure_rank(options.one_world) if options.one_world else connect_gloo(options.one_group)))
        return
    rows = []
    for ranks in options.worlds:
        found = measured("--one-world", ranks)
        counts = f"{ranks:,}", f"{found['calls']:,}", f"{found['member']}"
        rows.append([*counts, f"{found['start']:.2f}", f"{1e3 * found['step']:.0f}", f"{found['memory']:.0f}"])
    print(table("ranks | groups of the run | of this rank | start, s | step, ms | MiB", rows))
    rows = []
    for size in options.groups:
        both = [measured("--one-group", size, TORCH_GLOO_LAZY_INIT=lazy) for lazy in ("0", "1")]
        rows.append([str(size), *(f"{found[what]:.0f}" for what in ("operations", "files") for found in both)])
    names = (f"{what}, {when}" for what in ("store operations", "open files") for when in ("at once", "when used"))
    print(f"\nConnections of gloo, per rank:\n\n{table(' | '.join(['ranks', *names]), rows)}")


if __name__ == "__main__":
    main()
