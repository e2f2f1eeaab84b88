"""The processes of a program: those of torchrun, those of the program's own process group, or this process alone.

A function that needs the other processes joins them, and leaves them at its end. A process group that the program has
created itself is used as it is, and never destroyed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .groups import init_world
from .launch import Launch, device_of


@dataclass(frozen=True, slots=True)
class World:
    """All processes of the program, and the device of this one."""

    rank: int
    size: int
    device: torch.device


@contextmanager
def join_world(device: str = "auto", timeout: float | None = None) -> Iterator[World]:
    """Join the processes that torchrun started; without torchrun, this process is a world of one. Collective.

    Uses the default process group of torch.distributed if there is one; otherwise creates it, and destroys it at the
    end. device: cpu, cuda, or auto: a GPU for each process if there are enough, else the CPU. timeout: seconds that a
    collective operation waits; None: torch's default.

    Raises ValueError for a device that this machine lacks, and for a process group that cannot use it.
    """
    launch = current_launch()
    own = device_of(device, launch)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    with joined(own, launch, timeout):
        yield World(launch.rank, launch.world_size, own)


@contextmanager
def joined(device: torch.device, launch: Launch, timeout: float | None = None) -> Iterator[None]:
    """Inside this context there is a default process group; one that exists already is left as it is. Collective."""
    if dist.is_initialized():
        check_backends(device)
        yield
        return
    init_world(device, launch, timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def current_launch() -> Launch:
    """The place of this process in the default process group or, before there is one, in the launch of torchrun.

    A program that was started without torchrun has all its processes on one machine.
    """
    launch = Launch.from_environment()
    if not dist.is_initialized():
        return launch
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) == (launch.rank, launch.world_size):
        return launch
    return Launch(rank, rank, size, size)


def check_backends(device: torch.device) -> None:
    """Raise ValueError if the default process group lacks the backends for the CPU and for `device`."""
    options = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    backends = dist.get_backend_config()
    for kind, backend in (("cpu", "cpu:"), ("cuda", "cuda:nccl")):
        if kind in ("cpu", device.type) and backend not in backends:
            what = f"torch.distributed was initialized without a backend for {kind} tensors ({backends})"
            raise ValueError(f"{what}: use init_process_group({options!r})")
