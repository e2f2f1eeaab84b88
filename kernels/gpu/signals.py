"""Signals between ranks that write into each other's memory: waits with a limit, and releases.

Each rank has some memory that all ranks of a group map, in words of 32 bits:

    full      [slots]            full[s] = n: rank r has written its n-th message to slot s
    free      [slots]            free[s] = n: rank r has read this rank's n-th message in slot s
    windows   [slots, 1 + T, row]    a message of rank r: number of rows and layout, then the rows

in each of R regions. Only rank r writes to region r, so no two ranks write the same word. A message is written after a
wait for `free`, and read after a wait for `full`. `state`, in the memory of one rank, holds the number of finished
messages of each slot, so that a CUDA graph can be replayed.

A release is a store by one thread for each rank, in a kernel of its own, which is ordered after all programs of the
kernel that wrote or read the rows.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from .launch_args import interpreter_enabled, next_power_of_2

NOT_FREED, NOT_SENT, OTHER_LAYOUT, OVER_CAPACITY = 1, 2, 3, 4
"""Failures: `state[:5]` is the failure, the peer, the number of the operation, its layout, and what was found."""
EPOCHS = 5  # in `state`: from here on, finished messages of each slot
ALIGNMENT = 32  # words: 128 bytes
MAX_REGISTERS = 128  # without a number, ptxas spills some so that more programs fit on a multiprocessor
POLLS_PER_SECOND = 20_000  # of the interpreter, which has no clock
_NOT_FREED, _NOT_SENT, _OTHER_LAYOUT, _OVER_CAPACITY = map(
    tl.constexpr, (NOT_FREED, NOT_SENT, OTHER_LAYOUT, OVER_CAPACITY)
)
_EPOCHS = tl.constexpr(EPOCHS)


@dataclass(frozen=True, slots=True)
class Windows:
    """The memory of all ranks, as one of them sees it.

    addresses_R: address of the memory of each rank, int64. state: zeros of `state_words`, int32, private to this rank.
    max_tokens: T. row_words: length of a row in a window, a multiple of 4. weights_at, ids_at: where in a row the
    routing weights and the expert ids are. num_sms: programs of a kernel. timeout: seconds that a wait may take.
    """

    addresses_R: Tensor
    state: Tensor
    rank: int
    slots: int
    max_tokens: int
    row_words: int
    weights_at: int
    ids_at: int
    num_sms: int
    timeout: float

    @property
    def ranks(self) -> int:
        return len(self.addresses_R)

    @property
    def region_words(self) -> int:
        return region_words(self.slots, self.max_tokens, self.row_words)

    @property
    def constants(self) -> dict[str, Any]:
        """What the kernels know when they are compiled."""
        clock = not interpreter_enabled()
        return {
            "R": self.ranks, "R_PADDED": next_power_of_2(self.ranks), "WINDOW": self.max_tokens + 1,
            "START": first_window(self.slots) + self.row_words, "STRIDE": self.row_words, "REGION": self.region_words,
            "LIMIT": round(self.timeout * (1e9 if clock else POLLS_PER_SECOND)), "CLOCK": clock,
            "num_warps": 8, "maxnreg": MAX_REGISTERS,
        }  # fmt: skip

    def messages(self, memory: Tensor) -> Tensor:
        """The messages in a memory: [slots, R, 1 + T, row]. The first row is the header."""
        first, size = first_window(self.slots), (self.slots, self.max_tokens + 1, self.row_words)
        return memory.view(self.ranks, -1)[:, first : first + math.prod(size)].unflatten(1, size).transpose(0, 1)

    def flags(self, memory: Tensor) -> Tensor:
        """The words `full` in a memory: [slots, R]."""
        return memory.view(self.ranks, -1)[:, : self.slots].T

    def views(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Headers [slots, R, 2] and rows [slots, R, T, row] in the memory of this rank."""
        messages = self.messages(own)
        return messages[:, :, 0, :2], messages[:, :, 1:]


@dataclass(frozen=True, slots=True)
class Operation:
    """A dispatch or combine. number: of all operations. layout: a number that is the same on all ranks."""

    slot: int
    number: int
    layout: int


def first_window(slots: int) -> int:
    """Where the windows of a region start, in words."""
    return _round_up(2 * slots)


def region_words(slots: int, max_tokens: int, row_words: int) -> int:
    """The length of a region, in words."""
    return _round_up(first_window(slots) + slots * (max_tokens + 1) * row_words)


def _round_up(words: int) -> int:
    return -(-words // ALIGNMENT) * ALIGNMENT


def new_state(slots: int, device: torch.device) -> Tensor:
    return torch.zeros(EPOCHS + slots, dtype=torch.int32, device=device)


# ---- parts of kernels ----


@triton.jit
def memory_of(addresses, rank):
    return tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def region_of(memory, rank, REGION: tl.constexpr):
    """The part of a memory that a rank writes."""
    return memory + (tl.zeros((), tl.int64) + rank) * REGION


@triton.jit
def report(state, failure, peer, number, layout, found):
    """Record a failure, unless there is one already."""
    if tl.atomic_cas(state, 0, failure) == 0:
        tl.store(state + 1, peer)
        tl.store(state + 2, number)
        tl.store(state + 3, layout)
        tl.store(state + 4, found)


@triton.jit
def _acquire(word):
    """Load a word that others write. One thread loads it, so that all threads of the program see the same value."""
    return tl.atomic_add(word, 0, sem="acquire", scope="sys")


@triton.jit
def _time():
    """The time in ns, the same for all threads of the program: they must leave a loop together."""
    return tl.max(tl.zeros((256,), tl.int64) + globaltimer(), 0)


@triton.jit
def wait_for_all(flags, wanted, state, failure, number, layout, R: tl.constexpr, REGION: tl.constexpr,
                 LIMIT: tl.constexpr, CLOCK: tl.constexpr):  # fmt: skip
    """Wait until a flag in all R regions is at least `wanted`. Returns whether it is, and nothing has failed before.

    flags: that of the first region.
    """
    ok = _acquire(state) == 0
    waited = tl.zeros((), tl.int64)
    start = waited
    if CLOCK:
        start = _time()
    for r in range(R):
        if ok:
            flag = region_of(flags, r, REGION)
            value = _acquire(flag)
            while (value < wanted) & (waited < LIMIT):
                value = _acquire(flag)
                waited = _time() - start if CLOCK else waited + 1
            if value < wanted:
                report(state, failure, r, number, layout, value)
            ok = value >= wanted
    return ok


@triton.jit
def header_of(region, slot, WINDOW: tl.constexpr, START: tl.constexpr, STRIDE: tl.constexpr):
    """Number of rows and layout of a message."""
    return region + START - STRIDE + slot.to(tl.int64) * (WINDOW * STRIDE)


@triton.jit
def wait_until_free(addresses, state, rank, slot, number, layout, R: tl.constexpr, SLOTS: tl.constexpr,
                    REGION: tl.constexpr, LIMIT: tl.constexpr, CLOCK: tl.constexpr):  # fmt: skip
    """Wait until all ranks have read the last message of this rank in this slot."""
    flags, epoch = memory_of(addresses, rank) + SLOTS + slot, tl.load(state + _EPOCHS + slot)
    return wait_for_all(flags, epoch, state, _NOT_FREED, number, layout, R, REGION, LIMIT, CLOCK)


@triton.jit
def memories_of(addresses, r, R: tl.constexpr):
    return tl.load(addresses + r, mask=r < R, other=0).to(tl.pointer_type(tl.int32))


@triton.jit
def release(addresses, state, rank, slot, R: tl.constexpr, R_PADDED: tl.constexpr, SLOTS: tl.constexpr,
            REGION: tl.constexpr, FREE: tl.constexpr):  # fmt: skip
    """Tell all ranks that this rank has written to a slot or, with FREE, read it; unless something has failed."""
    if _acquire(state) == 0:
        epoch = tl.load(state + _EPOCHS + slot) + 1
        r = tl.arange(0, R_PADDED)
        flags_R = region_of(memories_of(addresses, r, R), rank, REGION) + SLOTS * FREE + slot
        tl.debug_barrier()
        tl.atomic_xchg(flags_R, epoch, mask=r < R, sem="release", scope="sys")
        if FREE:
            tl.store(state + _EPOCHS + slot, epoch)


@triton.jit(do_not_specialize=["rank", "slot"])
def release_kernel(addresses, state, rank, slot, R: tl.constexpr, R_PADDED: tl.constexpr, SLOTS: tl.constexpr,
                   REGION: tl.constexpr, FREE: tl.constexpr):  # fmt: skip
    release(addresses, state, rank, slot, R, R_PADDED, SLOTS, REGION, FREE)


def release_after(windows: Windows, slot: int, free: bool) -> None:
    """Release what the last kernel has written or, with `free`, read."""
    release_kernel[(1,)](
        windows.addresses_R, windows.state, windows.rank, slot, windows.ranks, next_power_of_2(windows.ranks),
        windows.slots, windows.region_words, free, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rank", "slot", "number", "layout"])
def wait_for_ranks_kernel(addresses, state, rank, slot, number, layout, R: tl.constexpr, REGION: tl.constexpr,
                LIMIT: tl.constexpr, CLOCK: tl.constexpr):  # fmt: skip
    epoch = tl.load(state + _EPOCHS + slot) + 1
    wait_for_all(
        memory_of(addresses, rank) + slot, epoch, state, _NOT_SENT, number, layout, R, REGION, LIMIT, CLOCK
    )  # fmt: skip


def wait_with_one_program(windows: Windows, operation: Operation) -> None:
    """Wait until all ranks have written a message, so that the next kernel finds it and occupies nothing until then."""
    sizes = {name: windows.constants[name] for name in ("R", "REGION", "LIMIT", "CLOCK")}
    wait_for_ranks_kernel[(1,)](
        windows.addresses_R, windows.state, windows.rank, operation.slot, operation.number, operation.layout, **sizes,
        num_warps=4,
    )  # fmt: skip
