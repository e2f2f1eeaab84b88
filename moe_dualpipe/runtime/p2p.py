"""Point-to-point transfers between pipeline ranks.

On CUDA nothing here blocks the host; on CPU, `Message.wait` does. Messages from one sender to one receiver arrive in
the order in which they were sent, and the executor posts receives in that order.

NCCL serializes all transfers between two ranks in one communicator, so a send could wait for a receive that was posted
early. Therefore, on CUDA, each direction (to a higher rank, to a lower rank) has a separate process group.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from ..overlap.waits import wait_for_all
from ..schedule import Recv, Send
from .groups import PIPELINE, create_group


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one tensor sent between stages; the same for all stages and micro-batches."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def random(self, device: torch.device) -> torch.Tensor:
        """A tensor of normal random numbers; of zeros for integers."""
        tensor = self.empty(device)
        return tensor.normal_() if self.has_gradient else tensor.zero_()

    @property
    def has_gradient(self) -> bool:
        return self.dtype.is_floating_point or self.dtype.is_complex


@dataclass(frozen=True, slots=True)
class Message:
    """Tensors that are being sent or received. Call `wait` once; then the current stream may use or change them."""

    tensors: tuple[torch.Tensor, ...]
    works: tuple[dist.Work, ...] = ()

    def wait(self) -> tuple[torch.Tensor, ...]:
        wait_for_all(self.works)
        return self.tensors


@dataclass(slots=True)
class _Steps:
    """The number of steps so far, and whether one failed.

    waiting: the transfer that this rank waits for, and the global rank at its other end. Another thread may read it.
    """

    count: int = 0
    failed: bool = False
    waiting: tuple[Recv | Send, int] | None = None


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
        cls, group: dist.ProcessGroup | None, specs: Sequence[TensorSpec], device: torch.device,
        pipeline_ranks: Sequence[int] | None = None, timeout: float | None = None,
        directions: Sequence[dist.ProcessGroup] = (),
    ) -> "P2P":  # fmt: skip
        """Create the links of the pipeline that `group` forms (None: a pipeline of one rank).

        pipeline_ranks: `pipeline_ranks[i]` is the pipeline rank of the group's rank i; by default i. Raises ValueError
        if it is not a permutation. directions: groups of the same ranks for messages to higher and to lower pipeline
        ranks. Without them, on CUDA, this creates them, collectively over `group`: do it before you create groups of
        only some of its ranks (`create_group`). timeout: seconds that their transfers wait; None: torch's default.
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
        rank = order[group.rank()]
        if device.type == "cpu":
            return cls(specs, device, rank, size, global_ranks, group, group)
        upward, downward = directions or (
            create_group(members, timeout, members_only=True, nccl=PIPELINE) for _ in range(2)
        )
        p2p = cls(specs, device, rank, size, global_ranks, upward, downward)
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
            self.steps.failed, self.steps.waiting = True, None
            raise

    def send(self, tensors: Sequence[torch.Tensor], to: int) -> Message:
        """Start sending to pipeline rank `to`; the tensors must not change before `wait`."""
        group = self.upward if to > self.rank else self.downward
        return self._start(dist.isend, [tensor.contiguous() for tensor in tensors], to, group)

    def recv(self, specs: Sequence[TensorSpec], source: int) -> Message:
        """Start receiving tensors of these `specs` from pipeline rank `source`."""
        group = self.upward if self.rank > source else self.downward
        return self._start(dist.irecv, [spec.empty(self.device) for spec in specs], source, group)

    def wait(self, transfer: Message, step: Recv | Send, peer: int) -> tuple[torch.Tensor, ...]:
        """Wait for the transfer of `step` with pipeline rank `peer`; meanwhile, `steps.waiting` says so."""
        self.steps.waiting = step, self.global_ranks[peer]
        tensors = transfer.wait()
        self.steps.waiting = None
        return tensors

    def _start(self, operation: Any, tensors: list[torch.Tensor], peer: int, group: Any) -> Message:
        works = tuple(operation(t, self.global_ranks[peer], group, self.steps.count) for t in tensors)
        assert None not in works, "this process is not a member of the pipeline's group"
        return Message(tuple(tensors), works)

    def _open_links(self) -> None:
        """Connect all pairs of neighbors now. Otherwise NCCL does it on the first message, blocking the host."""
        token = TensorSpec((1,), torch.float32)
        for low in range(self.num_ranks - 1):
            for source, to in ((low, low + 1), (low + 1, low)):
                if self.rank == source:
                    self.send([token.empty(self.device)], to).wait()
                elif self.rank == to:
                    self.recv([token], source).wait()
        torch.cuda.synchronize(self.device)
