"""Memory that all ranks of a group map, and into which each of them may write.

DeviceMemory    GPUs that access each other's memory: torch's symmetric memory
SharedMemory    processes on the CPUs of one machine: anonymous files, for tests of the kernels in the interpreter
"""

import os
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..shared.mailbox import Mailbox, Notice
from ..shared.memory import Segment, create_file

ALLOCATED = 0  # the kind of all notices
TIMEOUT = 600.0  # seconds


class MappedMemory(Protocol):
    """Makes memory for a group. `device`: where it is."""

    device: torch.device

    def allocate(self, num_words: int, group: dist.ProcessGroup) -> list[Tensor]:
        """Return the memory of each rank, zeros in int32.

        Collective. The memory is released when this object and the returned tensors are.
        """
        ...


class DeviceMemory:
    """Memory of the current GPU, which the GPUs of the other ranks map."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())

    def allocate(self, num_words: int, group: dist.ProcessGroup) -> list[Tensor]:
        import torch.distributed._symmetric_memory as symmetric

        own = symmetric.empty(num_words, dtype=torch.int32, device=self.device)
        own.zero_()
        torch.cuda.synchronize(self.device)  # other ranks may write as soon as they have mapped it
        handle = symmetric.rendezvous(own, group)
        # The handle's own table ignores where in an allocation the tensor starts.
        everyone = range(group.size())
        return [own if r == group.rank() else handle.get_remote_tensor(r, [num_words], torch.int32) for r in everyone]


class SharedMemory:
    """Memory of processes on one machine. It has no name in a file system, and vanishes with the processes."""

    device = torch.device("cpu")

    def allocate(self, num_words: int, group: dist.ProcessGroup) -> list[Tensor]:
        files = {group.rank(): create_file(4 * num_words)}

        def on_notice(peer: int, _notice: Notice, file: int | None) -> None:
            assert file is not None
            files[peer] = file

        mailbox = Mailbox(group, TIMEOUT, on_notice)
        everyone = range(group.size())
        for peer in everyone:
            if peer != group.rank():
                mailbox.post(peer, Notice(ALLOCATED, True, 0), files[group.rank()])
        mailbox.wait(lambda: [peer for peer in everyone if peer not in files], "it allocated memory")
        memories = [Segment(files[rank]).fields(((num_words, torch.int32),))[0][0] for rank in everyone]
        for file in files.values():
            os.close(file)
        return memories
