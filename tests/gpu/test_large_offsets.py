"""Tensors with more than 2^31 elements, where 32-bit offsets would overflow.

Only a few rows at the end of a buffer are written, so it takes almost no memory on a CPU. The expected result comes
from the same rows in a small tensor.
"""

import dataclasses

import pytest
import torch

from moe_dualpipe.kernels.gpu.configs import TileConfig
from moe_dualpipe.kernels.gpu.descriptors import weights_argument
from moe_dualpipe.kernels.gpu.gemm import rows_times_weights
from moe_dualpipe.kernels.gpu.permute import dot_rows, gather_rows, sum_partials, sum_rows
from moe_dualpipe.kernels.gpu.routing import top_k_experts
from moe_dualpipe.kernels.gpu.swiglu import swiglu_down_backward, swiglu_up
from moe_dualpipe.kernels.gpu.wgrad import weight_gradients
from moe_dualpipe.kernels.options import RoutingOptions
from tests.support.kernels import DEVICE, all_kernels

WIDTH = 16
FAR = 2**31 // WIDTH + 5  # number of rows of WIDTH elements
EXPERTS = FAR // WIDTH + 1  # number of matrices of WIDTH x WIDTH elements
CONFIG = TileConfig(16, 16, 16, 4, 1, 2)


class LastRows:
    """A tiling with one tile: the last three of `num_rows` rows, of one expert."""

    def __init__(self, num_rows, expert=0):
        self.num_rows, self.expert = num_rows, expert

    def __call__(self, block_m):
        tile = self.expert, self.num_rows - 3, self.num_rows
        return torch.tensor([(1, 0, 0), tile], device=DEVICE, dtype=torch.int32)

    def max_tiles(self, block_m):
        return 1


def end(num_rows, near):
    """A tensor of `num_rows` rows that ends with the rows `near`. The others are uninitialized."""
    t = torch.empty(num_rows, *near.shape[1:], dtype=near.dtype, device=DEVICE)
    t[num_rows - len(near) :] = near
    return t


def random(*shape):
    return torch.randn(*shape, device=DEVICE).half()


def last(rows):
    return torch.arange(rows - 3, rows, device=DEVICE)


X, BOTH, SQUARE = random(3, WIDTH), random(1, 2 * WIDTH, WIDTH), random(1, WIDTH, WIDTH)


def swiglu(rows):
    index, weights = end(rows, last(rows)), end(rows, torch.tensor([0.5, 0.25, 2.0], device=DEVICE))
    z, h = swiglu_up(end(rows, X), index, BOTH, LastRows(rows), weights, index)
    dz, wh, sums = swiglu_down_backward(end(rows, X), index, SQUARE, z, LastRows(rows), weights, index)
    return *(t[-3:] for t in (z, h, dz, wh)), sums[:, -3:]


def wgrads(rows):
    far_a, far_b, index = end(rows, X), end(rows, SQUARE[0, :3]), last(rows)
    zero, offsets = (torch.tensor([start, start + 3], device=DEVICE, dtype=torch.int32) for start in (0, rows - 3))
    return (
        weight_gradients(far_a, far_b, offsets, torch.float32),
        weight_gradients(far_a, far_b[-3:], zero, torch.float32, index_a=index),
        weight_gradients(far_a[-3:], far_b, zero, torch.float32, index_b=index),
    )


def weights_of_the_last(rows):
    experts, index = EXPERTS if rows == FAR else 1, last(3)
    one_tile, square, both = LastRows(3, experts - 1), end(experts, SQUARE), end(experts, BOTH)
    products = (rows_times_weights("down", X, square, one_tile, transposed) for transposed in (False, True))
    return *products, *swiglu_up(X, index, both, one_tile, None, index)


def gathered(rows):
    few, pairs = last(rows)[[2, 0]], torch.tensor([[2, 1], [-1, 0]], device=DEVICE)
    positions, far = torch.where(pairs < 0, -1, pairs + rows - 3), end(rows, X)
    found = gather_rows(far, few), gather_rows(far, few.int()), sum_rows(far, positions)
    return *found, dot_rows(X[:2], far, positions)


def long_rows(rows):
    """Rows whose stride is large."""
    far = torch.empty(3, (2**30 if rows == FAR else 0) + WIDTH, dtype=X.dtype, device=DEVICE)[:, :WIDTH]
    far[:] = X
    positions = torch.tensor([[0, 1], [1, 2], [2, 0]], device=DEVICE)
    wide = torch.empty(2, (2**31 if rows == FAR else 0) + WIDTH, dtype=torch.uint8, device=DEVICE)[:, :WIDTH]
    gather_rows(X.view(torch.uint8)[:, :WIDTH], torch.tensor([2, 0], device=DEVICE), wide)
    return dot_rows(far, far, positions), *top_k_experts(far, None, RoutingOptions(2)), wide


def products(rows):
    found = [rows_times_weights("down", end(rows, X), SQUARE, LastRows(rows), way)[-3:] for way in (False, True)]
    return *found, rows_times_weights("down", end(rows, X), SQUARE, LastRows(3), index=last(rows))


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("function", [products, swiglu, wgrads, weights_of_the_last, gathered, long_rows])
def test_the_end_of_a_large_tensor_gives_the_results_of_a_small_one(function, tma):
    with all_kernels(dataclasses.replace(CONFIG, tma=tma)):
        near, far = (function(rows) for rows in (3, FAR))
    assert all(map(torch.equal, near, far))


def test_partial_sums():
    parts = torch.empty(2, 2**30 + 3, device=DEVICE)
    parts[:, -3:] = torch.arange(6.0, device=DEVICE).view(2, 3)
    positions = torch.tensor([[2**30 + 2, -1], [2**30, 2**30 + 1]], device=DEVICE)
    assert sum_partials(parts, positions).tolist() == [[7, 0], [3, 5]]
    assert sum_partials(parts[:, -3:].contiguous(), positions - 2**30).tolist() == [[7, 0], [3, 5]]


def test_the_matrix_of_an_expert_has_fewer_than_2_31_elements():
    """Kernels compute offsets inside a matrix in 32 bits. Those of all weights may be larger."""
    box = 1, 16, 16
    weights_argument(torch.empty(3, 2**16, 2**15 - 1, device="meta"), box, False)
    with pytest.raises(ValueError, match=r"must have fewer than 2\^31 elements: got 65536 x 32768"):
        weights_argument(torch.empty(1, 2**16, 2**15, device="meta"), box, False)
