"""Transfers by copies: the kernels of OneSided write messages to memory of their own rank, and copy engines send them.

    send      a kernel writes the rows for each rank, with their number, into the staging memory of this rank
              on another stream, a copy takes the message to each rank, whole windows of `max_tokens` rows
              then a copy takes its flag: the number of the message, which the kernel has counted on the device
    receive   one program waits for the flags of all ranks; then kernels copy or sum the rows, and free the slot

The copies have the same sizes and addresses each time, so the host needs no counts, and a CUDA graph can be replayed.

A flag must not overtake its message. Copies of one stream run in order, but CUDA does not document what another GPU
sees of them. So trial.py tries it, and `flags="kernel"` lets one program of a kernel write the flags instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from ...overlap import streams
from ..protocol import Pending
from ..symmetric.one_sided import OneSided

if TYPE_CHECKING:
    from ...kernels.gpu.signals import Operation, Windows

V = TypeVar("V")
Flags = Literal["copies", "kernel"]


class Copies(OneSided):
    """A OneSided whose messages to other ranks are copied. The options are those of OneSided."""

    flags: Flags = "copies"

    def _map(self, memories: Sequence[Tensor]) -> None:
        super()._map(memories)
        # Like the memory of a rank, but region r is for rank r, not from it.
        self.staging = staging = torch.zeros_like(self.own)
        # Each rank starts with the next one, so that not all send to rank 0 first.
        peers = [(self.rank + i) % self.num_ranks for i in range(1, self.num_ranks)]
        self._messages, self._flags = (
            [[(of(memories[r])[slot, self.rank], of(staging)[slot, r]) for r in peers] for slot in range(self.slots)]
            for of in (self.windows.messages, self.windows.flags)
        )
        offsets_R = torch.arange(self.num_ranks, device=staging.device) - self.rank
        # Kernels write to region `rank` at each address. Messages to the own rank need no copy.
        self._staging_R = staging.data_ptr() + 4 * self.windows.region_words * offsets_R
        self._staging_R[self.rank] = self.own.data_ptr()
        device_streams = streams.streams_of(staging.device)
        self._stream: Any = None if device_streams is None else device_streams.Stream(staging.device)
        self._sent: list[Any] = [None] * self.slots

    def _send(self, operation: "Operation", push: "Callable[[Windows], None]") -> None:
        push(replace(self.windows, addresses_R=self._staging_R))
        if (device_streams := streams.streams_of(self.own.device)) is None:
            self._copy(operation.slot)
            return
        self._stream.wait_event(device_streams.current_stream(self.own.device).record_event())
        with device_streams.stream(self._stream):
            self._copy(operation.slot)
        self._sent[operation.slot] = self._stream.record_event()

    def _copy(self, slot: int) -> None:
        from ...kernels.gpu.signals import release_after

        for target, source in self._messages[slot]:
            target.copy_(source, non_blocking=True)
        if self.flags == "kernel":
            release_after(self.windows, slot, free=False)
        else:
            for target, source in self._flags[slot]:
                target.copy_(source, non_blocking=True)

    def _finish(self, operation: "Operation", receive: Callable[[], V]) -> Pending[V]:
        from ...kernels.gpu.signals import wait_with_one_program

        def receive_after_copies() -> V:
            if (device_streams := streams.streams_of(self.own.device)) is not None:
                device_streams.current_stream(self.own.device).wait_event(self._sent[operation.slot])
            wait_with_one_program(self.windows, operation)
            return receive()

        return super()._finish(operation, receive_after_copies)
