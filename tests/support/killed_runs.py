"""Runs whose processes a test can kill, stop or make fail."""

import os
import signal
import time
from contextlib import ExitStack
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


class Processes(ExitStack):
    """The processes of one run. The rendezvous store is in the test's process, as it is in torchrun's."""

    def __init__(self, size, config, patience=10.0, sabotage=None):
        super().__init__()
        self.config = config
        self.store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        self.logs = [Path(f"{config.checkpoint.out}-rank{rank}-{self.store.port}.log") for rank in range(size)]
        arguments = [(r, size, self.store.port, config, patience, self.logs[r], sabotage) for r in range(size)]
        self.processes = self.enter_context(ranks.started(ranked_run, arguments))

    def wait_for_steps(self, count):
        """Wait until `count` steps of this run are recorded."""
        path, end = Path(self.config.checkpoint.out, "metrics.jsonl"), time.monotonic() + 60
        while not path.exists() or path.read_text().count('"loss"') < count:
            assert time.monotonic() < end and self.processes[0].is_alive(), self.output(0)
            time.sleep(0.002)

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
