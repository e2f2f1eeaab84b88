"""In the interpreter, a kernel that reads or writes outside its arguments fails, also where that changes no result.

All tests of this folder run with that check. Here, it finds an index that is too large, in each of its kinds of access.
"""

import pytest
import torch
from triton.runtime.errors import InterpreterError

from moe_dualpipe.kernels.gpu import permute, push, wgrad
from tests.support.kernels import DEVICE, offsets_of
from tests.support.virtual_ranks import VirtualRanks, operation

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU need not notice: compute-sanitizer does")

INDEX = torch.tensor([0, 4, 10**6, 1, 2], dtype=torch.int32)
ROWS, OFFSETS, RANKS = torch.randn(5, 8), offsets_of([2, 3]), VirtualRanks(2, 5, 8, 1, False)
KERNELS = {
    "gather_rows": lambda: permute.gather_rows(ROWS, INDEX),
    "sum_rows": lambda: permute.sum_rows(ROWS, INDEX[:, None]),
    "weight_gradients": lambda: wgrad.weight_gradients(ROWS, ROWS, OFFSETS, torch.float32, INDEX),
    "push": lambda: push.push(RANKS.each[0], operation(0), ROWS, INDEX, OFFSETS),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_index_that_is_too_large_is_found(kernel):
    expected = rf"{kernel}_kernel: create_masked_(load|store) outside of its arguments"
    with pytest.raises(InterpreterError, match=expected):
        KERNELS[kernel]()
