"""Point-to-point transfers between pipeline ranks.

On CUDA nothing here blocks the host; on CPU, `Receiving.wait` and `Sending.wait` do. Messages of one sender to one
receiver arrive in the order in which they were sent, and the executor posts receives in that order.

NCCL serializes all transfers of a pair of ranks in one communicator, so a send could wait for a receive that was posted
early. Therefore, on CUDA, each direction (to a higher rank, to a lower rank) has a separate process group.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from .groups import create_group


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one tensor sent between stages; the same for all stages and micro-batches."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    @property
    def has_gradient(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex


@dataclass(frozen=True, slots=True)
class Receiving:
    """Tensors that are being received. Call `wait` once; then the current stream may use them."""

    tensors: tuple[torch.Tensor, ...]
    works: tuple[dist.Work, ...] = ()

    def wait(self) -> tuple[torch.Tensor, ...]:
        for work in self.works:
            work.wait()
        return self.tensors


@dataclass(frozen=True, slots=True)
class Sending:
    """Tensors that are being sent: keeps them alive until `wait`."""

    tensors: tuple[torch.Tensor, ...]
    works: tuple[dist.Work, ...]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass(slots=True)
class _Steps:
    """The number of steps so far, and whether one failed."""

    count: int = 0
    failed: bool = False


@dataclass(frozen=True)
class P2P:
    """The links of one pipeline. Create it with `connect`, on every rank of the group.

    Transfers belong to a step (`step()`): the next step never receives messages that a failed step has sent.
    """

    specs: tuple[TensorSpec, ...]
    device: torch.device
    rank: int
    num_ranks: int
    global_ranks: tuple[int, ...]  # global_ranks[pipeline rank]
    upward: dist.ProcessGroup | None  # carries messages to higher pipeline ranks
    downward: dist.ProcessGroup | None
    steps: _Steps = field(default_factory=_Steps)

    @classmethod
    def connect(
        cls,
        group: dist.ProcessGroup | None,
        specs: Sequence[TensorSpec],
        device: torch.device,
        pipeline_ranks: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> "P2P":
        """Create the links of the pipeline that `group` forms (None: a pipeline of one rank).

        pipeline_ranks: `pipeline_ranks[i]` is the pipeline rank of the group's rank i; by default i. timeout: seconds
        that a transfer waits on CUDA, where this creates groups; None: torch's default. On CUDA, collective over
        `group`. Raises ValueError if `pipeline_ranks` is not a permutation.
        """
        specs = tuple(specs)
        if group is None:
            return cls(specs, device, 0, 1, (0,), None, None)
        size = group.size()
        order = list(range(size)) if pipeline_ranks is None else list(pipeline_ranks)
        if sorted(order) != list(range(size)):
            raise ValueError(f"the pipeline ranks must be a permutation of 0..{size - 1}: got {order}")
        members = dist.get_process_group_ranks(group)
        global_ranks = tuple(members[order.index(rank)] for rank in range(size))
        if device.type == "cpu":
            upward = downward = group
        else:
            upward, downward = (create_group(members, timeout, members_only=True) for _ in range(2))
        p2p = cls(specs, device, order[group.rank()], size, global_ranks, upward, downward)
        if device.type != "cpu":
            p2p._open_links()
        return p2p

    def with_specs(self, specs: Sequence[TensorSpec]) -> "P2P":
        """The same links for tensors of other shapes."""
        return replace(self, specs=tuple(specs))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside this context, transfers belong to one step. Every rank must enter the same steps.

        After a failed step, gloo can continue, because its messages are tagged with the number of their step. NCCL has
        no tags, so on CUDA this raises RuntimeError.
        """
        if self.steps.failed and self.device.type != "cpu":
            raise RuntimeError("an earlier step failed and left transfers unfinished; restart the processes")
        self.steps.count += 1
        try:
            yield
        except BaseException:
            self.steps.failed = True
            raise

    def send(self, tensors: Sequence[torch.Tensor], to: int) -> Sending:
        """Start sending to pipeline rank `to`; the tensors must not change before `wait`."""
        held = tuple(tensor.contiguous() for tensor in tensors)
        group = self._link(self.rank, to)
        return Sending(
            held, tuple(_started(dist.isend(t, self.global_ranks[to], group, self.steps.count)) for t in held)
        )

    def recv(self, specs: Sequence[TensorSpec], source: int) -> Receiving:
        """Start receiving tensors of these `specs` from pipeline rank `source`."""
        held = tuple(spec.empty(self.device) for spec in specs)
        group = self._link(source, self.rank)
        return Receiving(
            held, tuple(_started(dist.irecv(t, self.global_ranks[source], group, self.steps.count)) for t in held)
        )

    def _link(self, source: int, to: int) -> dist.ProcessGroup | None:
        return self.upward if to > source else self.downward

    def _open_links(self) -> None:
        """Connect all pairs of neighbours. NCCL does so on the first message, blocking the host."""
        token = torch.zeros(1, device=self.device)
        for source, to in self._neighbours():
            if self.rank in (source, to):
                group = self._link(source, to)
                peer = self.global_ranks[to if self.rank == source else source]
                _started((dist.isend if self.rank == source else dist.irecv)(token, peer, group)).wait()
        torch.cuda.synchronize(self.device)

    def _neighbours(self) -> Iterator[tuple[int, int]]:
        for low in range(self.num_ranks - 1):
            yield low, low + 1
            yield low + 1, low


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this process is not a member of the pipeline's group"
    return work
