"""Measure the links between ranks with torch.distributed.

A link is timed by its sender, from the start of a message to the answer of the receiver, which is a few bytes. The
median of several messages counts. All pairs of a round run at the same time (rounds.py). All rounds run twice, and the
faster time of a link counts: other programs also slow a link down.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from .bounded_calls import Steps
from .rounds import Pair

REPEATS = 3
_TRIES = 2


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Messages from rank `source` to rank `to`. speed: bytes per second."""

    source: int
    to: int
    speed: float


class Links:
    """Measures on this rank. The default process group must exist; all ranks make the same calls."""

    def __init__(self, rank: int, device: torch.device, size: int, steps: Steps, repeats: int = REPEATS):
        """size: bytes of a message. `measured`: speeds by source and target.

        It grows link by link, so that a failure leaves what came before it.
        """
        self.rank, self.device, self.steps, self.repeats = rank, device, steps, repeats
        self.message = torch.zeros(size, dtype=torch.uint8, device=device)
        self.answer = torch.zeros(8, dtype=torch.uint8, device=device)
        self.measured: dict[Pair, float] = {}

    def meet(self, why: str) -> None:
        self.steps.start(f"waiting for the other ranks before {why}", waits=True)
        dist.all_reduce(torch.zeros(1))  # on CPUs: gloo

    def warm_up(self) -> None:
        """All ranks of a group must take part in NCCL's first operation."""
        self.meet("the first operation")
        self.steps.start("first operation of all ranks")
        dist.all_reduce(self.answer.float())
        self._wait()

    def run_rounds(self, rounds: Sequence[Sequence[Pair]]) -> None:
        """Measure both directions of each pair, and add this rank's as sender to `measured`."""
        for number, pairs in enumerate([*rounds] * _TRIES):
            mine = next((pair for pair in pairs if self.rank in pair), None)
            for forward in (True, False):
                self.meet(f"round {number + 1} of {len(rounds) * _TRIES}")
                if mine is not None:
                    self._one_way(*(mine if forward else mine[::-1]))

    def _one_way(self, source: int, to: int) -> None:
        self.steps.start(f"rank {source} -> rank {to}")
        times = []
        for _ in range(self.repeats + 1):
            start = time.perf_counter()
            if self.rank == source:
                self._send(self.message, to)
                self._receive(self.answer, to)
            else:
                self._receive(self.message, source)
                self._send(self.answer, source)
            times.append(time.perf_counter() - start)
        if self.rank == source:  # the first message opens the connection
            speed = self.message.numel() / statistics.median(times[1:])
            self.measured[source, to] = max(speed, self.measured.get((source, to), 0.0))

    def _send(self, tensor: torch.Tensor, to: int) -> None:
        # As a batch: NCCL then uses the connections of the whole group, not a communicator for each pair.
        self._run(dist.P2POp(dist.isend, tensor, to))

    def _receive(self, tensor: torch.Tensor, source: int) -> None:
        self._run(dist.P2POp(dist.irecv, tensor, source))

    def _run(self, operation: dist.P2POp) -> None:
        for work in dist.batch_isend_irecv([operation]):
            work.wait()
        self._wait()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def start_nccl_log() -> Path | None:
    """Let NCCL log to a temporary file. None: the user has asked for a log, which is left alone."""
    if "NCCL_DEBUG" in os.environ or "NCCL_DEBUG_FILE" in os.environ:
        return None
    handle, name = tempfile.mkstemp(prefix="nccl-", suffix=".log")
    os.close(handle)
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,P2P", "NCCL_DEBUG_FILE": name}
    return Path(name)


def uses_sockets(log: Path | None) -> bool:
    """Whether NCCL sends over TCP, as it does silently if it finds no InfiniBand. Only its log says so. Removes it."""
    if log is None:
        return False
    text = log.read_text(errors="replace") if log.exists() else ""
    log.unlink(missing_ok=True)
    return "via NET/Socket" in text
