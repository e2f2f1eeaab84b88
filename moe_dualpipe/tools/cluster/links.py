"""Measure the links between ranks with torch.distributed.

A link is timed by its sender, from the start of a message to the answer of the receiver, which is a few bytes. The
median of several messages counts. All pairs of a round run at the same time. All rounds run twice, and the faster time
of a link counts: other programs also slow a link down.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .bounded_calls import Steps

Pair = tuple[int, int]
WAITING = "waiting for the other ranks"
"""The start of the names of steps that time out because other ranks failed."""
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

    def __init__(self, rank: int, device: torch.device, size: int, steps: Steps, measured: dict[Pair, float]):
        """size: bytes of a message. measured: gets the speeds by source and target, link by link."""
        self.rank, self.device, self.steps = rank, device, steps
        self.message = torch.zeros(size, dtype=torch.uint8, device=device)
        self.answer = torch.zeros(8, dtype=torch.uint8, device=device)
        self.measured = measured

    def meet(self, why: str) -> None:
        self.steps.start(f"{WAITING} before {why}")
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
        for _ in range(REPEATS + 1):
            start = time.perf_counter()
            if self.rank == source:
                self._transfer(dist.isend, self.message, to)
                self._transfer(dist.irecv, self.answer, to)
            else:
                self._transfer(dist.irecv, self.message, source)
                self._transfer(dist.isend, self.answer, source)
            times.append(time.perf_counter() - start)
        if self.rank == source:  # the first message opens the connection
            speed = self.message.numel() / statistics.median(times[1:])
            self.measured[source, to] = max(speed, self.measured.get((source, to), 0.0))

    def _transfer(self, operation: Callable[..., Any], tensor: torch.Tensor, peer: int) -> None:
        # As a batch: NCCL then uses the connections of the whole group, not a communicator for each pair.
        for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer)]):
            work.wait()
        self._wait()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def rounds_of(machines: Sequence[Sequence[int]]) -> list[list[Pair]]:
    """Rounds of disjoint pairs of ranks, in which each pair appears once. machines: the ranks of each.

    The places of both partners differ only in some bits. The lower bits are the place in the machine, so that pairs
    within a machine and pairs between machines never share a round: the ranks of a machine share its network card, so
    otherwise the speed of a pair would depend on its round. Between machines, each machine has one partner. Sizes are
    rounded up to powers of two.

    Example: [[0, 1], [2, 3]] -> [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 3), (1, 2)]].
    """
    width, most = (1 << (number - 1).bit_length() for number in (max(map(len, machines)), len(machines)))
    places = {m * width + i: rank for m, ranks in enumerate(machines) for i, rank in enumerate(ranks)}
    rounds = []
    for bits in range(1, width * most):
        partners = {rank: places[place ^ bits] for place, rank in places.items() if place ^ bits in places}
        rounds.append(sorted((a, b) for a, b in partners.items() if a < b))
    return [pairs for pairs in rounds if pairs]
