"""The backend for GPUs that write into each other's memory (one_sided.py), with a process group."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ...kernels.backend import Kernels
from ..gather import gather_objects
from ..rank_facts import SEVERAL_MACHINES, RankFacts, all_on, several_machines
from .memory import DeviceMemory, MappedMemory, SharedMemory
from .one_sided import DirectWrites, OneSided, check_triton


class Symmetric(OneSided):
    """Experts are divided evenly over the ranks of `group`, in order. Their GPUs can write into each other's memory.

    Every rank must call the same operations in the same order, with at most `slots` transfers in flight. Creating the
    backend is collective.

    max_tokens: largest number of tokens of a rank. hidden_size, dtype: width and widest dtype of a row; a row is a
    multiple of 16 bytes. top_k: largest number of choices per token. These, and `slots`, are the same on all ranks.
    capacity: number of rows that this rank can receive; None: as many as all ranks can send. num_sms: multiprocessors
    for a transfer. timeout: seconds that a rank waits for another one. memory: how to allocate the memory that other
    ranks write to (memory.py); by default, on the current GPU, or without one, in memory that processes share. On a
    CPU, kernels run in Triton's interpreter.

    Raises ValueError for sizes that cannot be used, or that differ between ranks. Operations raise RuntimeError if the
    ranks call different ones or if a rank receives too many rows, and DistError, a RuntimeError, if a rank does not
    answer. On a GPU, a later operation or `check` raises such an error, and results in between are wrong. A CUDA graph
    can capture whole layers, if all ranks capture the same. Call `check` between two captures.
    """

    def __init__(
        self, num_experts: int, group: dist.ProcessGroup, kernels: Kernels = "auto", *, max_tokens: int,
        hidden_size: int, top_k: int, capacity: int | None = None, num_sms: int = 20, slots: int = 2,
        timeout: float = 600.0, memory: MappedMemory | None = None, dtype: torch.dtype = torch.float32,
        transport: DirectWrites | None = None,
    ):  # fmt: skip
        super().__init__(
            num_experts, group.size(), group.rank(), kernels, max_tokens=max_tokens,
            row_bytes=hidden_size * dtype.itemsize, top_k=top_k, capacity=capacity, num_sms=num_sms, slots=slots,
            timeout=timeout, transport=transport,
        )  # fmt: skip
        self.names = dist.get_process_group_ranks(group)
        self.memory = memory or (DeviceMemory() if torch.cuda.is_available() else SharedMemory())
        check_triton(self.memory.device)
        _check_equal(group, max_tokens=max_tokens, bytes_of_a_row=self.max_row, top_k=top_k, slots=slots)
        self.connect(self.memory.allocate(self.memory_words, group))

    @classmethod
    def fault(cls, facts: Sequence[RankFacts]) -> str:
        if not all_on("cuda", facts):
            return "it needs GPUs"
        if several_machines(facts):
            return SEVERAL_MACHINES
        if any(other.gpu != one.gpu and other.gpu not in one.peers for one in facts for other in facts):
            return "the GPUs cannot access each other's memory"
        return ""


def _check_equal(group: dist.ProcessGroup, **sizes: int) -> None:
    """Raise ValueError on all ranks if sizes differ: a rank would write outside the windows of another one."""
    everyone = gather_objects(sizes, group)
    for name in sizes:
        if len(different := {each[name] for each in everyone}) > 1:
            name = name.replace("bytes_of_a_row", "bytes of a row (hidden_size x dtype)")
            raise ValueError(f"{name} must be the same on all ranks: got {', '.join(map(str, sorted(different)))}")
