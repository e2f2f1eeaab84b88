"""Runs whose processes a test can kill, stop or make fail."""

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from moe_dualpipe.health.signals import Stop
from moe_dualpipe.health.watch import joining, watch_ranks
from moe_dualpipe.training.loop import train_loop
from moe_dualpipe.training.step import Trainer
from tests.support import ranks
from tests.support.runs import make_run


def ranked_run(rank, size, port, config, patience, log, sabotage):
    """Do what train.py does after it has read its options, and write the output to `log`."""
    torch.set_num_threads(1)
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    store, wait = dist.TCPStore("127.0.0.1", port, size, is_master=False), timedelta(seconds=config.health.timeout)
    with joining(rank, config.health.timeout):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait)
    stop = Stop()
    with stop.on_signals(), watch_ranks(config.health.timeout, patience) as progress:
        trainer = Trainer(make_run(config, rank, size), progress, stop)
        if sabotage is not None:
            sabotage(trainer)
        train_loop(trainer)
    dist.destroy_process_group()


class Processes:
    """The processes of one run. The rendezvous store is in the test's process, as it is in torchrun's."""

    def __init__(self, size, config, patience=10.0, sabotage=None):
        self.config = config
        path = Path(config.checkpoint.out, "metrics.jsonl")
        if path.exists():  # remove records of earlier attempts after their last checkpoint
            old = [
                line for line in path.open() if line.endswith("}\n") and json.loads(line)["step"] <= self.first_step()
            ]
            path.write_text("".join(old))
        self.store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        folder = Path(config.checkpoint.out).parent
        self.logs = [
            folder / f"{Path(config.checkpoint.out).name}-rank{rank}-{self.store.port}.log" for rank in range(size)
        ]
        arguments = [(r, size, self.store.port, config, patience, self.logs[r], sabotage) for r in range(size)]
        self.processes = [ranks._context.Process(target=ranked_run, args=a, daemon=True) for a in arguments]

    def records(self):
        path = Path(self.config.checkpoint.out, "metrics.jsonl")
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [line for line in lines if '"loss"' in line and line.endswith("\n")]

    def __enter__(self):
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.join()

    def wait_for_steps(self, count):
        """Wait until `count` steps of this run are recorded."""
        first = self.first_step()
        end = time.monotonic() + 60
        while not any(json.loads(line)["step"] >= first + count for line in self.records()):
            assert time.monotonic() < end and self.processes[0].is_alive(), self.output(0)
            time.sleep(0.002)

    def first_step(self):
        return (
            int(Path(self.config.checkpoint.resume).name.removeprefix("step-")) if self.config.checkpoint.resume else 0
        )

    def kill(self, rank, number=signal.SIGKILL):
        os.kill(self.processes[rank].pid, number)

    def exit_codes(self, *which):
        for rank in which:
            self.processes[rank].join(60)
        return [self.processes[rank].exitcode for rank in which]

    def output(self, rank):
        return self.logs[rank].read_text(errors="replace")


def newest(out):
    """The newest checkpoint folder of a run."""
    found = sorted(Path(out, "checkpoints").glob("step-*"))
    return str(found[-1]) if found else None
