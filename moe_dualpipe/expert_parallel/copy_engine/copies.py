"""Transfers by copies: kernels write messages to memory of their own rank, and copy engines send them.

    send      a kernel writes the rows for each rank, with their number, into the staging memory of this rank
              on another stream, a copy takes the message to each rank, whole windows of `max_tokens` rows
              then a copy takes its flag: the number of the message, which the kernel has counted on the device
    receive   one program waits for the flags of all ranks; then kernels copy or sum the rows, and free the slot

The copies have the same sizes and addresses each time, so the host needs no counts, and a CUDA graph can be replayed.

A flag must not overtake its message. Copies of one stream run in order, but CUDA does not document what another GPU
sees of them. So trial.py tries it, and `flags="kernel"` lets one program of a kernel write the flags instead.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ...overlap import streams
from ..symmetric.one_sided import DirectWrites

if TYPE_CHECKING:
    from ...kernels.gpu.signals import Operation, Windows
    from ..symmetric.one_sided import Push

Flags = Literal["copies", "kernel"]


class Copies(DirectWrites):
    """Messages to other ranks are written to memory of this rank, and copied from there. flags: see `CopyEngine`."""

    def __init__(self, flags: Flags = "copies"):
        self.flags = flags

    def connect(self, windows: "Windows", memories: Sequence[Tensor]) -> None:
        rank, num_ranks, own = windows.rank, len(memories), memories[windows.rank]
        # Like the memory of a rank, but region r is for rank r, not from it.
        self.staging = staging = torch.zeros_like(own)
        # Each rank starts with the next one, so that not all send to rank 0 first.
        peers = [(rank + i) % num_ranks for i in range(1, num_ranks)]
        self._messages, self._flags = (
            [[(of(memories[r])[slot, rank], of(staging)[slot, r]) for r in peers] for slot in range(windows.slots)]
            for of in (windows.messages, windows.flags)
        )
        offsets_R = torch.arange(num_ranks, device=staging.device) - rank
        # Kernels write to region `rank` at each address. Messages to the own rank need no copy.
        self._staging_R = staging.data_ptr() + 4 * windows.region_words * offsets_R
        self._staging_R[rank] = own.data_ptr()
        device_streams = streams.streams_of(staging.device)
        self._stream: Any = None if device_streams is None else device_streams.Stream(staging.device)
        self._sent: list[Any] = [None] * windows.slots

    def send(self, windows: "Windows", operation: "Operation", fields: Sequence[Tensor], push: "Push") -> None:
        push(replace(windows, addresses_R=self._staging_R), None)
        if (device_streams := streams.streams_of(self.staging.device)) is None:
            self._copy(windows, operation.slot)
            return
        self._stream.wait_event(device_streams.current_stream(self.staging.device).record_event())
        with device_streams.stream(self._stream):
            self._copy(windows, operation.slot)
        self._sent[operation.slot] = self._stream.record_event()

    def _copy(self, windows: "Windows", slot: int) -> None:
        from ...kernels.gpu.signals import release_after

        for target, source in self._messages[slot]:
            target.copy_(source, non_blocking=True)
        if self.flags == "kernel":
            release_after(windows, slot, free=False)
        else:
            for target, source in self._flags[slot]:
                target.copy_(source, non_blocking=True)

    def receive(self, windows: "Windows", operation: "Operation") -> None:
        from ...kernels.gpu.signals import wait_with_one_program

        if (device_streams := streams.streams_of(self.staging.device)) is not None:
            device_streams.current_stream(self.staging.device).wait_event(self._sent[operation.slot])
        wait_with_one_program(windows, operation)
