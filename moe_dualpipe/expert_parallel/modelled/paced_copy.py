"""Copy rows in no less than a given time, on a given number of streaming multiprocessors: a modelled link on a GPU.

A transfer costs a GPU more than time: its blocks hold SMs that computing could use, and its bytes take memory
bandwidth. So the copy is real, one block on each SM it is to occupy, and each block waits before every piece until the
clock says that a link of that speed would have got so far.

The Triton kernel for NVIDIA GPUs (%globaltimer); the plain-torch operator is `clone`, which knows no time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

BLOCK = 4096  # bytes in a piece


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


def paced_copy(rows: Tensor, seconds: float, sms: int) -> Tensor:
    """A copy of `rows`, which is there `seconds` after the kernel starts, or later if copying takes longer.

    sms: how many blocks copy, each on an SM of its own as long as there are so many free. Queued on the current stream.
    """
    source = rows.contiguous()
    target = torch.empty_like(source)
    num_bytes = source.nbytes
    pieces_each = max(1, triton.cdiv(triton.cdiv(num_bytes, BLOCK), sms))
    _paced_copy[(sms,)](
        source.view(-1).view(torch.uint8) if num_bytes else source,
        target.view(-1).view(torch.uint8) if num_bytes else target,
        num_bytes,
        round(seconds * 1e9),
        pieces_each,
        BLOCK=BLOCK,  # type: ignore[arg-type]
        PACED=rows.is_cuda,  # type: ignore[arg-type]
    )
    return target
