"""The backend on torch.distributed: asynchronous all-to-alls of variable size over NCCL or gloo."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.backend import Kernels
from ..overlap import streams
from ..overlap.annotation import annotation
from ..overlap.labels import LINK_WAIT
from .exchange import AsyncResult, Exchange, receive_buffer, start_copy_to_host


class AllToAll(Exchange):
    """Experts are divided evenly over the ranks of `group`, in order.

    Every rank must call the same operations in the same order. Give the backend a process group of its own, because
    transfers in one group wait for each other. remote: ranks of the group on other machines; `remote_bytes` counts what
    this rank sends to them.
    Raises ValueError if the experts cannot be divided evenly, or if the kernels are not available.
    """

    def __init__(
        self, num_experts: int, group: dist.ProcessGroup, kernels: Kernels = "auto", remote: Sequence[int] = ()
    ):
        super().__init__(num_experts, group.size(), group.rank(), kernels)
        self.group, self.remote = group, remote

    def all_to_all_counts(self, counts_R2: Tensor) -> AsyncResult[Tensor]:
        device_streams = streams.streams_of(counts_R2.device)
        counts_in_R2 = torch.empty_like(counts_R2)
        work = _not_none(dist.all_to_all_single(counts_in_R2, counts_R2, group=self.group, async_op=True))
        if device_streams is None:
            return AsyncResult([_AnnotatedWork(work)], lambda: torch.stack([counts_R2, counts_in_R2]))
        work.wait()  # a stream wait, not a host block
        return AsyncResult([], start_copy_to_host(torch.stack([counts_R2, counts_in_R2]), device_streams))

    def all_to_all(self, rows: Tensor, rows_out: list[int], rows_in: list[int]) -> AsyncResult[Tensor]:
        self.remote_bytes += sum(rows_out[r] for r in self.remote) * rows.shape[1] * rows.element_size()
        received = receive_buffer(rows, sum(rows_in))
        work = _not_none(dist.all_to_all_single(received, rows, rows_in, rows_out, group=self.group, async_op=True))
        # The lambda keeps `rows` alive until the transfer ends: torch.distributed does not copy its input.
        return AsyncResult([_AnnotatedWork(work)], lambda _sent=rows: received)


class _AnnotatedWork:
    """A transfer whose waits are visible in profiles."""

    def __init__(self, work: dist.Work):
        self.work = work

    def wait(self) -> None:
        with annotation(LINK_WAIT):
            self.work.wait()


def _not_none(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is not a member of the group"
    return work
