"""In the interpreter, a kernel that reads or writes outside its arguments fails, also where that changes no result.

All tests of this folder run with that check. Here, an index that is too large is found in each kernel that takes one.
"""

import pytest
import torch
from triton.runtime.errors import InterpreterError

from moe_dualpipe.kernels.gpu import gemm, permute, push, receive, swiglu, wgrad
from moe_dualpipe.kernels.gpu.tiles import Tiling
from moe_dualpipe.kernels.permute import gather
from tests.support.kernels import DEVICE, offsets_of
from tests.support.virtual_ranks import VirtualRanks, operation

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU need not notice: compute-sanitizer does")

ROWS, D, F = 5, 8, 16
FIRST_TOO_LARGE = 10**6
INDEX = torch.tensor([0, 4, FIRST_TOO_LARGE, 1, 2], dtype=torch.int32)


def rows(columns=D):
    return torch.randn(ROWS, columns)


def tiling():
    return Tiling(offsets_of([2, 3]), ROWS)


def launch_push():
    ranks = VirtualRanks(2, ROWS, D, 1, False)
    push.push(ranks.each[0], operation(0), rows(), INDEX, torch.tensor([0, 3, 5], dtype=torch.int32))


def launch_receive_sums():
    ranks, starts = VirtualRanks(2, ROWS, D, 1, False), torch.tensor([0, 0, 0], dtype=torch.int32)
    for windows in ranks.each:
        push.push(windows, operation(0), rows(), None, starts)
    receive.receive_sums(ranks.each[0], operation(0), rows(), INDEX[:, None].contiguous(), starts)


KERNELS = {
    "gather_rows": lambda: permute.gather_rows(rows(), INDEX),
    "sum_rows": lambda: permute.sum_rows(rows(), INDEX[:, None]),
    "dot_rows": lambda: permute.dot_rows(rows(), rows(), INDEX[:, None]),
    "sum_partials": lambda: permute.sum_partials(torch.randn(2, ROWS), INDEX[:, None]),
    "swiglu_up": lambda: swiglu.swiglu_up(rows(), INDEX, torch.randn(2, 2 * F, D), tiling(), None, INDEX),
    "swiglu_down_backward": lambda: swiglu.swiglu_down_backward(
        rows(), INDEX, torch.randn(2, D, F), rows(2 * F), tiling(), None, INDEX
    ),
    "rows_times_weights": lambda: gemm.rows_times_weights("up", rows(), torch.randn(2, F, D), tiling(), index=INDEX),
    "weight_gradients": lambda: wgrad.weight_gradients(rows(), rows(), offsets_of([2, 3]), torch.float32, INDEX),
    "push": launch_push,
    "receive_sums": launch_receive_sums,
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_index_that_is_too_large_is_found(kernel):
    with pytest.raises(
        InterpreterError, match=rf"{kernel}_kernel: create_masked_(load|store) outside of its arguments"
    ):
        KERNELS[kernel]()


def test_an_output_of_another_shape_is_refused():
    for kernels in ("reference", "triton"):
        with pytest.raises(ValueError, match=r"out must be \[5, 8\]: got \[5, 9\]"):
            gather(rows(), INDEX * 0, rows(9), kernels)
