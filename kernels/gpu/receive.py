"""Receive the rows that other ranks have written here: the second half of a one-sided dispatch or combine, in Triton.

    receive_rows    copies rows, routing weights and expert ids to private memory, sorted by source rank, then token
    receive_sums    sums the rows of each token in the order of ranks, in fp32

Both wait until all ranks have written (signals.py), and free the slot at the end. After a failure, they return NaN,
because rows may be missing and the host sees the failure only later.

R ranks, T tokens, N received rows, K choices per row, C rows per token, D width of a row in elements, W in words.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_args import next_power_of_2
from .signals import (
    _EPOCHS,
    _NOT_SENT,
    _OTHER_LAYOUT,
    _OVER_CAPACITY,
    Operation,
    Windows,
    header_of,
    memory_of,
    region_of,
    release_after,
    report,
    wait_for_all,
)

BLOCK = 4096  # words that a program copies at a time
BLOCK_SUM = 2048  # elements that a program sums at a time
_NAN_WORD = tl.constexpr(0x7FC07FC0)  # NaN in fp32, and twice in bf16 and in fp16


@triton.jit
def _wait_until_full(addresses, state, rank, slot, number, layout, R: tl.constexpr, R_PADDED: tl.constexpr,
                     WINDOW: tl.constexpr, START: tl.constexpr, STRIDE: tl.constexpr, REGION: tl.constexpr,
                     LIMIT: tl.constexpr, CLOCK: tl.constexpr):  # fmt: skip
    """Wait until all ranks have written to a slot. Returns the rows of each, and whether all of them are valid."""
    own = memory_of(addresses, rank)
    epoch = tl.load(state + _EPOCHS + slot) + 1
    ok = wait_for_all(own + slot, epoch, state, _NOT_SENT, number, layout, R, REGION, LIMIT, CLOCK)
    r = tl.arange(0, R_PADDED)
    header_R = header_of(region_of(own, r, REGION), slot, WINDOW, START, STRIDE)
    full_R = r < tl.where(ok, R, 0)  # the interpreter of Triton 3.9 makes integers of a scalar in a mask
    count_R = tl.load(header_R, mask=full_R, other=0)
    layout_R = tl.load(header_R + 1, mask=full_R, other=layout)
    differs = tl.max(tl.where(layout_R != layout, r + 1, 0), 0)
    if differs > 0:
        found = tl.sum(tl.where(r == differs - 1, layout_R, 0), 0)
        report(state, _OTHER_LAYOUT, differs - 1, number, layout, found)
    return count_R, ok & (differs == 0)


@triton.jit(do_not_specialize=["rank", "slot", "number", "layout", "capacity"])
def receive_rows_kernel(
    x, weights, ids, offsets, addresses, state, rank, slot, number, layout, capacity, W: tl.constexpr,
    WEIGHTS_AT: tl.constexpr, IDS_AT: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr, BLOCK: tl.constexpr,
    R: tl.constexpr, R_PADDED: tl.constexpr, WINDOW: tl.constexpr, START: tl.constexpr,
    STRIDE: tl.constexpr, REGION: tl.constexpr, LIMIT: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    r = tl.arange(0, R_PADDED)
    k = tl.arange(0, K_PADDED)
    count_R, ok = _wait_until_full(
        addresses, state, rank, slot, number, layout, R, R_PADDED, WINDOW, START, STRIDE, REGION, LIMIT, CLOCK
    )  # fmt: skip
    end_R = tl.cumsum(count_R, 0)
    total = tl.sum(count_R, 0)
    if ok & (total > capacity):
        report(state, _OVER_CAPACITY, rank, number, layout, total)
    ok = ok & (total <= capacity)
    total = tl.where(ok, total, 0)
    if program == 0:
        tl.store(offsets, 0)
        tl.store(offsets + 1 + r, tl.where(ok, end_R, 0), mask=r < R)
    if ok:
        windows = memory_of(addresses, rank) + START
        for n in range(program, total, programs):
            peer = tl.sum(((end_R <= n) & (r < R)).to(tl.int32), 0)
            place = n - tl.sum(tl.where(r == peer, end_R - count_R, 0), 0)
            source = region_of(windows, peer, REGION) + (slot.to(tl.int64) * WINDOW + place) * STRIDE
            row = tl.zeros((), tl.int64) + n
            for first in range(0, W, BLOCK):
                w = first + tl.arange(0, BLOCK)
                tl.store(x + row * W + w, tl.load(source + w, mask=w < W), mask=w < W)
            if weights is not None:
                values = tl.load(source + WEIGHTS_AT + k, mask=k < K).to(tl.float32, bitcast=True)
                tl.store(weights + row * K + k, values, mask=k < K)
            if ids is not None:
                tl.store(ids + row * K + k, tl.load(source + IDS_AT + k, mask=k < K), mask=k < K)
    else:
        for n in range(program, capacity, programs):
            row = tl.zeros((), tl.int64) + n
            for first in range(0, W, BLOCK):
                w = first + tl.arange(0, BLOCK)
                tl.store(x + row * W + w, tl.full((BLOCK,), _NAN_WORD, tl.int32), mask=w < W)
            if weights is not None:
                tl.store(weights + row * K + k, tl.full((K_PADDED,), float("nan"), tl.float32), mask=k < K)
    if ids is not None:  # the rows that remain have no experts
        nothing = tl.full((BLOCK,), -1, tl.int32)
        for first in range(total * K + program * BLOCK, capacity * K, programs * BLOCK):
            w = first + tl.arange(0, BLOCK)
            tl.store(ids + w, nothing, mask=w < capacity * K)


def receive_rows(
    windows: Windows, operation: Operation, x_ND: Tensor, offsets: Tensor, weights_NK: Tensor | None = None,
    ids_NK: Tensor | None = None,
) -> None:  # fmt: skip
    """Copy the received rows to x_ND, and write the start of each rank's rows to offsets, [R + 1] in int32.

    N is the largest number of rows that this rank can receive. With fewer rows, the ids of the others are -1, and
    nothing else is written for them. After a failure, no row has experts, and rows and weights are NaN. Outputs are
    contiguous; weights are fp32, and ids are int32.
    """
    words_NW = x_ND.view(torch.int32)
    words, choices = words_NW.shape[1], next((t.shape[1] for t in (weights_NK, ids_NK) if t is not None), 1)
    receive_rows_kernel[(windows.num_sms,)](
        words_NW, weights_NK, ids_NK, offsets, windows.addresses_R, windows.state, windows.rank, operation.slot,
        operation.number, operation.layout, len(x_ND), words, windows.weights_at, windows.ids_at, choices,
        next_power_of_2(choices), min(BLOCK, next_power_of_2(words)), **windows.constants,
    )  # fmt: skip
    release_after(windows, operation.slot, free=True)


@triton.jit
def _find_row(windows, position, offsets, end_R, slot, REGION: tl.constexpr, WINDOW: tl.constexpr,
              STRIDE: tl.constexpr):  # fmt: skip
    """The row of the windows for a position among the sent rows, and whether there is one."""
    m = tl.load(position)
    peer = tl.sum((end_R <= m).to(tl.int32), 0)
    place = slot.to(tl.int64) * WINDOW + m - tl.load(offsets + peer)
    return region_of(windows, peer, REGION) + place * STRIDE, m >= 0


@triton.jit(do_not_specialize=["rank", "slot", "number", "layout", "num_tokens"])
def receive_sums_kernel(
    y, weight_grads, slots, offsets, addresses, state, rank, slot, number, layout, num_tokens, C: tl.constexpr,
    D: tl.constexpr, WEIGHTS_AT: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr, BLOCK: tl.constexpr,
    R: tl.constexpr, R_PADDED: tl.constexpr, WINDOW: tl.constexpr, START: tl.constexpr,
    STRIDE: tl.constexpr, REGION: tl.constexpr, LIMIT: tl.constexpr, CLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, R_PADDED)
    k = tl.arange(0, K_PADDED)
    _, ok = _wait_until_full(
        addresses, state, rank, slot, number, layout, R, R_PADDED, WINDOW, START, STRIDE, REGION, LIMIT, CLOCK
    )  # fmt: skip
    end_R = tl.load(offsets + 1 + r, mask=r < R, other=0x7FFFFFFF)
    windows = memory_of(addresses, rank) + START
    if ok:
        for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
            t = tl.zeros((), tl.int64) + token
            for first in range(0, D, BLOCK):
                d = first + tl.arange(0, BLOCK)
                total = tl.zeros((BLOCK,), tl.float32)
                for c in tl.static_range(C):
                    position = slots + t * C + c
                    row, valid = _find_row(windows, position, offsets, end_R, slot, REGION, WINDOW, STRIDE)
                    row = row.to(tl.pointer_type(y.dtype.element_ty))
                    total += tl.load(row + d, mask=d < tl.where(valid, D, 0), other=0.0).to(tl.float32)
                tl.store(y + t * D + d, total.to(y.dtype.element_ty), mask=d < D)
            if weight_grads is not None:
                sums = tl.zeros((K_PADDED,), tl.float32)
                for c in tl.static_range(C):
                    position = slots + t * C + c
                    row, valid = _find_row(windows, position, offsets, end_R, slot, REGION, WINDOW, STRIDE)
                    row = (row + WEIGHTS_AT).to(tl.pointer_type(tl.float32))
                    sums += tl.load(row + k, mask=k < tl.where(valid, K, 0), other=0.0)
                tl.store(weight_grads + t * K + k, sums, mask=k < K)
    else:
        for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
            t = tl.zeros((), tl.int64) + token
            for first in range(0, D, BLOCK):
                d = first + tl.arange(0, BLOCK)
                tl.store(y + t * D + d, tl.full((BLOCK,), float("nan"), y.dtype.element_ty), mask=d < D)
            if weight_grads is not None:
                tl.store(weight_grads + t * K + k, tl.full((K_PADDED,), float("nan"), tl.float32), mask=k < K)


def receive_sums(
    windows: Windows, operation: Operation, y_TD: Tensor, slots_TC: Tensor, offsets: Tensor,
    weight_grads_TK: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the sums of the received rows to y_TD, and those of their fp32 fields to weight_grads_TK. No rows: zero.

    slots_TC: int32, contiguous: positions of the rows of each token among the sent rows, ascending; -1: none.
    offsets: where those of each rank start, [R + 1] in int32. Outputs are contiguous. Sums are in the order of C, and
    rounded once. After a failure, both are NaN.
    """
    width, choices = y_TD.shape[1], 1 if weight_grads_TK is None else weight_grads_TK.shape[1]
    receive_sums_kernel[(windows.num_sms,)](
        y_TD, weight_grads_TK, slots_TC, offsets, windows.addresses_R, windows.state, windows.rank, operation.slot,
        operation.number, operation.layout, len(y_TD), slots_TC.shape[1], width, windows.weights_at, choices,
        next_power_of_2(choices), min(BLOCK_SUM, next_power_of_2(width)), **windows.constants,
    )  # fmt: skip
    release_after(windows, operation.slot, free=True)
