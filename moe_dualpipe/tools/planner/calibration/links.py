"""Time messages and exchanges between two processes with torch.distributed: gloo on CPUs, NCCL on GPUs."""

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

REPEATS = 5


def measure_link(rank: int, device: torch.device, num_bytes: int) -> dict[str, float] | None:
    """Exchange `num_bytes` between ranks 0 and 1. All ranks call this; the others get None."""
    pair = dist.new_group([0, 1])
    if rank > 1:
        return None
    assert isinstance(pair, dist.ProcessGroup)
    large, small = (torch.zeros(size, dtype=torch.uint8, device=device) for size in (num_bytes // 2 * 2, 16))

    def both_ways() -> None:
        sends = [dist.P2POp(dist.isend, large, 1 - rank, pair), dist.P2POp(dist.irecv, received, 1 - rank, pair)]
        for work in dist.batch_isend_irecv(sends):
            work.wait()

    def exchange(data: torch.Tensor) -> None:
        dist.all_to_all_single(torch.empty_like(data), data, group=pair)

    received = torch.empty_like(large)
    times = [_seconds(run, device) for run in (both_ways, lambda: exchange(large), lambda: exchange(small))]
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=pair)
    return rates(large.numel(), *slowest.tolist())


def rates(num_bytes: int, message: float, all_to_all: float, latency: float) -> dict[str, float]:
    """bandwidth: bytes per second that one process sends while it receives as much. share: of it, that an all-to-all
    reaches. latency: seconds of an all-to-all of a few bytes.

    From the seconds of a message of `num_bytes`, and of an all-to-all of as much, of which a rank keeps one half.

    Example: 1,000 bytes, 1 s, 2 s: 1,000 bytes/s, of which the all-to-all reaches 500 / 2 = 250.
    """
    exchanged = num_bytes / 2 / all_to_all
    bandwidth = max(num_bytes / message, exchanged)
    return {"bandwidth": bandwidth, "share": exchanged / bandwidth, "latency": latency}


def _seconds(run: Callable[[], None], device: torch.device) -> float:
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times[1:])  # the first one opens the connection
