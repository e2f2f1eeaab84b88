"""A slow rank: two processes that communicate through gloo, one of which computes longer in the experts."""

import time
from pathlib import Path

import torch
import torch.distributed as dist

from moe_dualpipe.expert_parallel import AllToAll
from moe_dualpipe.overlap.labels import FORWARD, label
from moe_dualpipe.tools.profiler.capture import capture
from moe_dualpipe.tools.profiler.pair import Pair

from .faults import PacedEngine, overlapped, workload

EXTRA = 0.1
"""Extra seconds that the slow rank sleeps in each mlp(F)."""
START = 0.7
"""Seconds until both profilers have started."""


def record_ranks(folder: Path, rounds: int, warm_up: int = 1) -> None:
    """Record `rounds` runs with a slow rank 1 and without, in turns, into the files of `recordings`. Collective.

    Needs a process group with two ranks on one machine.
    """
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    pair = Pair(workload(), AllToAll(workload().model.num_experts, group))

    def slow(text: str) -> None:
        if text == label("mlp", FORWARD) and rank == 1:
            time.sleep(EXTRA)

    for number in range(-warm_up, rounds):
        for fault in (True, False):
            pair.prepare()
            moment = torch.tensor(time.time() + START, dtype=torch.float64)
            dist.broadcast(moment, 0)
            start = moment.item()
            with capture(recordings(folder, fault, number)[rank], torch.device("cpu")):
                time.sleep(max(0.0, start - time.time()))
                overlapped(pair, PacedEngine(inside=[slow] if fault else []))
    dist.barrier()


def recordings(folder: Path, fault: bool, number: int) -> list[Path]:
    """The files of both ranks in one round."""
    return [folder / f"{'slow' if fault else 'healthy'}-{number}-rank{rank}.json" for rank in range(2)]
