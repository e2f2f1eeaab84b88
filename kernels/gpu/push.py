"""Push rows into the windows of other ranks: the first half of a one-sided dispatch or combine, in Triton.

A program takes rows one after another, finds the destination of each in the offsets, and stores the row there. The
offsets are read on the device, so the host need not know how many rows go where. The number of programs is the number
of multiprocessors used. signals.py has the waits and the releases.

Rows can be written at the pace of a modeled link: before a program writes a row, it waits until such a link would have
carried the row and all rows before it. Rows for the own rank take no time. The programs occupy their multiprocessors
until the end of the transfer. The interpreter has no clock, and does not wait.

R ranks, S sent rows, W 32-bit words in a row, K choices per row.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_args import interpreter_enabled, next_power_of_2
from .signals import (
    Operation,
    Windows,
    _time,
    header_of,
    memories_of,
    memory_of,
    region_of,
    release_after,
    wait_until_free,
)

BLOCK = 4096  # words that a program moves at a time: 4 loads of 16 bytes in flight for each thread of 8 warps


@dataclass(frozen=True, slots=True)
class Pace:
    """The speed of a modeled link. `sent` counts the bytes sent to other ranks: one int64 on the device.

    row_bytes: bytes of a row. latency_ns: of a transfer. ns_per_row: time of one row.
    """

    row_bytes: int
    latency_ns: float
    ns_per_row: float
    sent: Tensor


@triton.jit
def _wait_for_link(start, rows, latency_ns, ns_per_row):
    """Wait until a transfer that started at `start` has carried this many rows."""
    end = start + (latency_ns + rows * ns_per_row).to(tl.int64)
    while _time() < end:
        pass


@triton.jit
def _write_headers(addresses, rank, slot, layout, count_R, R: tl.constexpr, R_PADDED: tl.constexpr,
                   WINDOW: tl.constexpr, START: tl.constexpr, STRIDE: tl.constexpr,
                   REGION: tl.constexpr):  # fmt: skip
    r = tl.arange(0, R_PADDED)
    header_R = header_of(region_of(memories_of(addresses, r, R), rank, REGION), slot, WINDOW, START, STRIDE)
    tl.store(header_R, count_R, mask=r < R)
    tl.store(header_R + 1, tl.zeros((R_PADDED,), tl.int32) + layout, mask=r < R)


@triton.jit(do_not_specialize=["rank", "slot", "number", "layout", "row_bytes"])
def push_kernel(
    x, weights, ids, index, offsets, addresses, state, rank, slot, number, layout, sent, row_bytes, latency_ns,
    ns_per_row, STRIDE_X: tl.constexpr, W: tl.constexpr, WEIGHTS_AT: tl.constexpr, IDS_AT: tl.constexpr,
    K: tl.constexpr, K_PADDED: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, R_PADDED: tl.constexpr,
    SLOTS: tl.constexpr, WINDOW: tl.constexpr, START: tl.constexpr, STRIDE: tl.constexpr, REGION: tl.constexpr,
    LIMIT: tl.constexpr, CLOCK: tl.constexpr, PACED: tl.constexpr,
):  # fmt: skip
    if PACED:
        start = _time()
    r = tl.arange(0, R_PADDED)
    k = tl.arange(0, K_PADDED)
    start_R = tl.load(offsets + r, mask=r < R, other=0)
    end_R = tl.load(offsets + 1 + r, mask=r < R, other=0x7FFFFFFF)
    own_first = tl.load(offsets + rank)
    own_rows = tl.load(offsets + rank + 1) - own_first
    if wait_until_free(addresses, state, rank, slot, number, layout, R, SLOTS, REGION, LIMIT, CLOCK):
        if tl.program_id(0) == 0:
            _write_headers(addresses, rank, slot, layout, end_R - start_R, R, R_PADDED, WINDOW, START, STRIDE, REGION)
        for m in range(tl.program_id(0), tl.load(offsets + R), tl.num_programs(0)):
            peer = tl.sum((end_R <= m).to(tl.int32), 0)
            place = slot.to(tl.int64) * WINDOW + m - tl.load(offsets + peer)
            target = region_of(memory_of(addresses, peer), rank, REGION) + START + place * STRIDE
            if PACED:
                own_before = tl.minimum(tl.maximum(m + 1 - own_first, 0), own_rows)
                _wait_for_link(start, m + 1 - own_before, latency_ns, ns_per_row)
            row = tl.zeros((), tl.int64) + m
            source = row if index is None else tl.load(index + m).to(tl.int64)
            for first in range(0, W, BLOCK):
                w = first + tl.arange(0, BLOCK)
                tl.store(target + w, tl.load(x + source * STRIDE_X + w, mask=w < W), mask=w < W)
            if weights is not None:
                values = tl.load(weights + source * K + k, mask=k < K).to(tl.int32, bitcast=True)
                tl.store(target + WEIGHTS_AT + k, values, mask=k < K)
            if ids is not None:
                tl.store(target + IDS_AT + k, tl.load(ids + row * K + k, mask=k < K), mask=k < K)
        rows = tl.load(offsets + R) - own_rows
        if PACED:
            _wait_for_link(start, rows, latency_ns, ns_per_row)
        if sent is not None:
            tl.atomic_add(sent, rows.to(tl.int64) * row_bytes, mask=tl.program_id(0) == 0, sem="relaxed")


def push(
    windows: Windows, operation: Operation, x_TD: Tensor, index_S: Tensor | None, offsets: Tensor,
    weights_TK: Tensor | None = None, ids_SK: Tensor | None = None, pace: Pace | None = None,
) -> None:  # fmt: skip
    """For each rank r, write the rows x[index[m]] with offsets[r] <= m < offsets[r + 1] to its window, in this order.

    x_TD: rows of whole 16 bytes with contiguous elements, at addresses that are multiples of 16. index_S: None: all
    rows, in order. offsets: [R + 1] in int32. weights_TK: fp32, contiguous, sent with the rows. ids_SK: int32,
    contiguous, sent in the order of `index_S`. pace: None: as fast as possible.

    Example: index [4, 0, 4] and offsets [0, 2, 3] give rows x[4], x[0] to rank 0 and x[4] to rank 1.
    """
    words_TW = x_TD.view(torch.int32)
    words, choices = words_TW.shape[1], next((t.shape[1] for t in (weights_TK, ids_SK) if t is not None), 1)
    link = (None, 0, 0.0, 0.0) if pace is None else (pace.sent, pace.row_bytes, pace.latency_ns, pace.ns_per_row)
    push_kernel[(windows.num_sms,)](
        words_TW, weights_TK, ids_SK, index_S, offsets, windows.addresses_R, windows.state, windows.rank,
        operation.slot, operation.number, operation.layout, *link, words_TW.stride(0), words,
        windows.weights_at, windows.ids_at, choices, next_power_of_2(choices), min(BLOCK, next_power_of_2(words)),
        SLOTS=windows.slots, **windows.constants, PACED=pace is not None and not interpreter_enabled(),
    )  # fmt: skip
    release_after(windows, operation.slot, free=False)
