"""Kernels must not read out of bounds. Every tensor ends at the end of a memory page, and the next page is protected.

A value that is read past the end and then discarded changes no result, and on a GPU it is not always an illegal access.
Here such a read kills the process. On a GPU, compute-sanitizer finds such reads.
"""

import ctypes
import faulthandler
import mmap
import multiprocessing

import pytest
import torch

from moe_dualpipe.kernels.experts import experts
from moe_dualpipe.kernels.gpu.configs import TileConfig
from moe_dualpipe.kernels.grouped_gemm import grouped_linear
from moe_dualpipe.kernels.order import ExpertOrder
from moe_dualpipe.kernels.permute import gather, permute, unpermute
from moe_dualpipe.kernels.routing import expert_order, rank_order, route
from tests.support.kernels import DEVICE, all_kernels, offsets_of

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="protects pages of host memory")
libc = ctypes.CDLL(None, use_errno=True)
maps = []  # kept alive until the process ends


def empty(*shape, dtype=None, device=None, **options):
    """torch.empty, with memory that ends at a protected page."""
    shape = torch.Size(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
    dtype = dtype or torch.float32
    size = shape.numel() * dtype.itemsize
    if not size or options or torch.device(device or "cpu").type != "cpu":
        return allocate(shape, dtype=dtype, device=device, **options)
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    maps.append(mmap.mmap(-1, pages + mmap.PAGESIZE))
    start = ctypes.addressof(ctypes.c_char.from_buffer(maps[-1]))
    assert libc.mprotect(ctypes.c_void_p(start + pages), mmap.PAGESIZE, 0) == 0
    return torch.frombuffer(maps[-1], dtype=dtype, count=shape.numel(), offset=pages - size).view(shape)


allocate = torch.empty


def fenced(t):
    return empty(t.shape, dtype=t.dtype).copy_(t)


def leaf(*shape):
    return fenced(torch.randn(shape)).requires_grad_()


def routing():
    for groups in (1, 3):
        for score in ("softmax", "sigmoid"):
            logits, bias = leaf(7, 9), fenced(torch.randn(9))
            weights, _ = route(
                logits, 3, score=score, bias_E=bias, num_groups=groups, top_groups=1 + groups // 2, kernels="triton"
            )
            weights.backward(fenced(torch.randn(7, 3)))
    for rows in (1, 43, 64, 150):
        expert_order(fenced(torch.randint(0, 5, (rows, 3))), 5, kernels="triton")
        rank_order(fenced(torch.randint(0, 6, (rows, 3))), 2, 3, kernels="triton")


def order_of(rows, choices, num_experts):
    order = expert_order(torch.randint(0, num_experts, (rows, choices)), num_experts, kernels="reference")
    return ExpertOrder(*(fenced(getattr(order, name)) for name in order.__slots__[:4]))


def moved_rows():
    for rows, columns, choices in ((7, 33, 3), (3, 2500, 2), (130, 16, 1)):
        order = order_of(rows, choices, 4)
        moved = permute(leaf(rows, columns), order, "triton")
        moved.backward(fenced(torch.randn(moved.shape)))
        for weights in (None, leaf(rows, choices)):
            y = unpermute(leaf(rows * choices, columns), order, weights, "triton")
            y.backward(fenced(torch.randn(y.shape)))


def products():
    for tma in (False, True):
        with all_kernels(TileConfig(16, 32, 16, 4, 1, 2, tma)):
            for i, o in ((37, 13), (24, 40), (32, 40)):
                y = grouped_linear(leaf(26, i), leaf(4, o, i), fenced(offsets_of([3, 0, 20, 3])), kernels="triton")
                y.backward(fenced(torch.randn(y.shape)))


def whole_experts():
    for d, f, tma in ((37, 13, False), (24, 40, True)):
        with all_kernels(TileConfig(16, 32, 16, 4, 1, 2, tma)):
            weights = leaf(7, 3)
            y = experts(leaf(7, d), leaf(4, 2 * f, d), leaf(4, d, f), order_of(7, 3, 4), weights, kernels="triton")
            y.backward(fenced(torch.randn(y.shape)))


def read_past_the_end():
    faulthandler.disable()  # pytest's would print a traceback
    gather(leaf(3, 5).detach(), fenced(torch.tensor([0, 3])), kernels="triton")


def run_fenced(function):
    torch.empty = empty
    torch.empty_like = lambda t: empty(t.shape, dtype=t.dtype)
    torch.Tensor.new_empty = lambda t, *shape, **options: empty(*shape, **{"dtype": t.dtype, **options})  # type: ignore
    function()


def exit_code(function):
    process = multiprocessing.get_context("fork").Process(target=run_fenced, args=(function,))
    process.start()
    process.join(120)
    return process.exitcode


@pytest.mark.parametrize("function", [routing, moved_rows, products, whole_experts])
@pytest.mark.quick("routing", "moved_rows", "products")
def test_kernels_do_not_read_past_the_end(function):
    assert exit_code(function) == 0


def test_a_read_past_the_end_is_detected():
    assert exit_code(read_past_the_end) < 0
