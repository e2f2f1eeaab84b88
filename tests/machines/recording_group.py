"""A process group without other processes: it records what this rank launches and waits for.

All ranks of a run can be recorded in one process, one after the other. No data is sent: an all-to-all returns this
rank's own input, or zeros if it receives more or less, and a receive returns random numbers, or zeros for integers.
A broadcast of another rank returns zeros, or leaves integers as they are. A sum is that of equal tensors on all ranks.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .launches import Lane, Launch, Program, Wait

_BACKEND = "recording"


class Recorder:
    """The launches and waits of one rank. describe: returns the text for a launch, given its operation.

    serial_links: transfers between the same two ranks of a group run one after the other, in both directions, as with
    NCCL.
    """

    def __init__(self, describe: Callable[[str], str], serial_links: bool):
        self.describe, self.serial_links = describe, serial_links
        self.program: Program = []

    def launch(self, lane: Lane, operation: str, tensor: Tensor, rows: bool = False) -> "_Recorded":
        """rows: the number of rows may differ between ranks."""
        shape = [*tensor.shape[1:]] if rows else [*tensor.shape]
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.program.append(Launch(lane, f"{self.describe(operation)}, {dtype}{shape}"))
        return _Recorded(self.program, len(self.program) - 1)


class _Recorded(dist.Work):
    """A recorded launch. program: None if nothing is recorded."""

    def __init__(self, program: Program | None = None, index: int = 0):
        super().__init__()
        self.program, self.index = program, index

    def wait(self, timeout: Any = None) -> bool:
        if self.program is not None:
            self.program.append(Wait(self.index))
        return True

    def get_future(self) -> Any:
        future = torch.futures.Future[None]()
        future.set_result(None)
        return future


class RecordingGroup(dist.ProcessGroup):
    """Records once `recorder` is set. Methods have the names and arguments of torch.distributed."""

    def __init__(self, options: Any, _: Any = None):
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self.own_rank, self.num_ranks = options.group_rank, options.group_size
        self.ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        self.purpose = ""
        self.recorder: Recorder | None = None

    def rank(self) -> int:
        return self.own_rank

    def size(self) -> int:
        return self.num_ranks

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return _BACKEND

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        if opts.reduceOp == dist.ReduceOp.SUM:
            tensors[0].mul_(self.num_ranks)
        return self._record(self.ranks, "all-reduce", tensors[0])

    def allgather(  # type: ignore[override]
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None
    ) -> dist.Work:
        for output in output_tensors[0]:
            output.copy_(input_tensors[0])
        return self._record(self.ranks, "all-gather", input_tensors[0])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        output.copy_(input.flatten().repeat(self.num_ranks).view_as(output))
        return self._record(self.ranks, "all-gather", input)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        if opts.rootRank != self.own_rank and tensors[0].is_floating_point():
            tensors[0].zero_()
        return self._record(self.ranks, f"broadcast from {self.ranks[opts.rootRank]}", tensors[0])

    def all_to_all_single(  # type: ignore[override]
        self, output: Tensor, input: Tensor, rows_in: list[int], rows_out: list[int], opts: Any = None
    ) -> dist.Work:
        output.copy_(input) if len(output) == len(input) else output.zero_()
        return self._record(self.ranks, "all-to-all", input, rows=True)

    alltoall_base = all_to_all_single  # type: ignore[assignment] # its name before torch 2.13

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> dist.Work:
        return self._transfer(tensors[0], self.own_rank, dstRank)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> dist.Work:
        tensors[0].normal_() if tensors[0].is_floating_point() else tensors[0].zero_()
        return self._transfer(tensors[0], srcRank, self.own_rank)

    def _transfer(self, tensor: Tensor, *ends: int) -> dist.Work:
        source, to = (self.ranks[end] for end in ends)
        serial = self.recorder is not None and self.recorder.serial_links
        return self._record(
            (min(source, to), max(source, to)) if serial else (source, to), f"rank {source} to {to}", tensor
        )

    def _record(self, ranks: tuple[int, ...], operation: str, tensor: Tensor, rows: bool = False) -> dist.Work:
        if self.recorder is None:
            return _Recorded()
        return self.recorder.launch(Lane(self.purpose, ranks), operation, tensor, rows)


@contextmanager
def recording_world(rank: int, num_ranks: int) -> Iterator[RecordingGroup]:
    """In this context, this process is `rank` of a run with `num_ranks`. Yields the group of all ranks."""
    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, RecordingGroup, extended_api=True, devices=["cpu"])
    hook = sys.excepthook  # replaced by torch
    dist.init_process_group(_BACKEND, rank=rank, world_size=num_ranks, store=dist.HashStore())
    try:
        world: Any = dist.group.WORLD
        yield world
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
