"""Copy rows in at least a given time, on a given number of multiprocessors: a modelled link on a GPU.

A transfer takes more than time from a GPU: it also occupies SMs and memory bandwidth. So the rows are really copied, by
one block per SM. Before it copies a piece, a block waits until a link of that speed would have transferred the piece.

The Triton kernel needs an NVIDIA GPU (%globaltimer). In the interpreter it copies without waiting.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

BLOCK = 4096  # bytes per piece


@triton.jit(do_not_specialize=["num_bytes", "duration_ns", "pieces_each"])
def _paced_copy(source, target, num_bytes, duration_ns, pieces_each, BLOCK: tl.constexpr, PACED: tl.constexpr):
    if PACED:
        start = globaltimer()
    first = tl.program_id(0) * pieces_each
    for piece in range(pieces_each):
        if PACED:
            due = start + duration_ns.to(tl.int64) * (piece + 1) // pieces_each
            while globaltimer() < due:
                pass
        offsets = (first + piece).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < num_bytes
        tl.store(target + offsets, tl.load(source + offsets, mask=mask), mask=mask)


def paced_copy(rows: Tensor, target: Tensor, seconds: float, sms: int) -> Tensor:
    """Copy `rows` to contiguous `target` in `seconds`, or more if copying is slower. Return `target`.

    sms: number of blocks, each on one SM if enough SMs are free.
    """
    source = rows.contiguous()
    num_bytes = source.nbytes
    pieces_each = max(1, triton.cdiv(triton.cdiv(num_bytes, BLOCK), sms))
    constants: dict[str, Any] = {"BLOCK": BLOCK, "PACED": rows.is_cuda}
    a, b = (t.view(-1).view(torch.uint8) if num_bytes else t for t in (source, target))
    _paced_copy[(sms,)](a, b, num_bytes, round(seconds * 1e9), pieces_each, **constants)
    return target
