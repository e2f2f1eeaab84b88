"""Tensors with more than 2^31 elements, where 32-bit offsets would overflow.

Only a few rows at the end of a buffer are written, so it takes almost no memory on a CPU. The expected result comes
from the same rows in a small tensor.
"""

import dataclasses
import itertools

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


def at_the_end(num_rows, near):
    """A tensor of `num_rows` rows that ends with the rows `near`. The others are uninitialized."""
    t = torch.empty(num_rows, *near.shape[1:], dtype=near.dtype, device=DEVICE)
    t[num_rows - len(near) :] = near
    return t


def random(*shape):
    return torch.randn(*shape, device=DEVICE).half()


@pytest.mark.parametrize("tma", [False, True])
def test_rows_of_grouped_products(tma):
    a, w = random(3, WIDTH), random(1, WIDTH, WIDTH)
    with all_kernels(dataclasses.replace(CONFIG, tma=tma)):
        for transposed in (False, True):
            near, far = (
                rows_times_weights("down", at_the_end(rows, a), w, LastRows(rows), transposed) for rows in (3, FAR)
            )
            assert torch.equal(far[-3:], near)


def test_gathered_rows_of_grouped_products():
    a, w = random(3, WIDTH), random(1, WIDTH, WIDTH)
    with all_kernels(CONFIG):
        near, far = (
            rows_times_weights(
                "down", at_the_end(rows, a), w, LastRows(3), index=torch.arange(rows - 3, rows, device=DEVICE)
            )
            for rows in (3, FAR)
        )
    assert torch.equal(far, near)


def test_weights_of_the_last_expert():
    experts = FAR // WIDTH + 1
    a, w = random(3, WIDTH), random(1, WIDTH, WIDTH)

    with all_kernels(CONFIG):
        for transposed in (False, True):
            near = rows_times_weights("down", a, w, LastRows(3), transposed)
            far = rows_times_weights("down", a, at_the_end(experts, w), LastRows(3, experts - 1), transposed)
            assert torch.equal(far, near)
        both, index = random(1, 2 * WIDTH, WIDTH), torch.arange(3, device=DEVICE)
        near = swiglu_up(a, index, both, LastRows(3), None, index)
        far = swiglu_up(a, index, at_the_end(experts, both), LastRows(3, experts - 1), None, index)
        assert all(torch.equal(*pair) for pair in zip(far, near, strict=True))


def test_rows_of_the_swiglu_products():
    x, gate_up, down, weights = random(3, WIDTH), random(1, 2 * WIDTH, WIDTH), random(1, WIDTH, WIDTH), None
    results = []
    for rows in (3, FAR):
        index = at_the_end(rows, torch.arange(rows - 3, rows, device=DEVICE))
        choice = index
        weights = at_the_end(rows, torch.tensor([0.5, 0.25, 2.0], device=DEVICE))
        far_x = at_the_end(rows, x)
        with all_kernels(CONFIG):
            z, h = swiglu_up(far_x, index, gate_up, LastRows(rows), weights, choice)
            dz, wh, sums = swiglu_down_backward(far_x, index, down, z, LastRows(rows), weights, choice)
        results.append([z[-3:], h[-3:], dz[-3:], wh[-3:], sums[:, -3:]])
    for near, far in zip(*results, strict=True):
        assert torch.equal(far, near)


@pytest.mark.parametrize("tma", [False, True])
def test_rows_of_weight_gradients(tma):
    a, b = random(3, WIDTH), random(3, WIDTH)
    results = []
    for rows in (3, FAR):
        far_a, far_b = at_the_end(rows, a), at_the_end(rows, b)
        index = torch.arange(rows - 3, rows, device=DEVICE)
        zero, last = (torch.tensor([start, start + 3], device=DEVICE, dtype=torch.int32) for start in (0, rows - 3))
        with all_kernels(dataclasses.replace(CONFIG, tma=tma)):
            results.append([
                weight_gradients(far_a, far_b, last, torch.float32),
                weight_gradients(far_a, far_b[-3:], zero, torch.float32, index_a=index),
                weight_gradients(far_a[-3:], far_b, zero, torch.float32, index_b=index),
            ])  # fmt: skip
    for near, far in zip(*results, strict=True):
        assert torch.equal(far, near)


def test_rows_that_are_gathered_and_summed():
    rows = random(3, WIDTH)
    far = at_the_end(FAR, rows)
    index = torch.tensor([FAR - 1, FAR - 3], device=DEVICE)
    for narrow in (index, index.int()):
        assert torch.equal(gather_rows(far, narrow), rows[[2, 0]])
    positions = torch.tensor([[FAR - 1, FAR - 2], [-1, FAR - 3]], device=DEVICE)
    near = torch.tensor([[2, 1], [-1, 0]], device=DEVICE)
    assert torch.equal(sum_rows(far, positions), sum_rows(rows, near))
    assert torch.equal(dot_rows(rows[:2], far, positions), dot_rows(rows[:2], rows, near))
    wide = torch.empty(2, 2**31 + WIDTH, dtype=torch.uint8, device=DEVICE)[:, :WIDTH]  # a row stride above 2^31
    gather_rows(rows.view(torch.uint8)[:, :WIDTH], index - (FAR - 3), wide)
    assert torch.equal(wide, rows.view(torch.uint8)[[2, 0], :WIDTH])


def test_large_row_strides():
    rows = random(3, WIDTH)
    far = torch.empty(3, 2**30 + WIDTH, dtype=rows.dtype, device=DEVICE)[:, :WIDTH]
    far[:] = rows
    positions = torch.tensor([[0, 1], [1, 2], [2, 0]], device=DEVICE)
    assert torch.equal(dot_rows(far, far, positions), dot_rows(rows, rows, positions))
    ours, expected = (top_k_experts(logits, None, RoutingOptions(2)) for logits in (far, rows))
    assert all(torch.equal(*pair) for pair in zip(ours, expected, strict=True))


def test_partial_sums():
    parts = torch.empty(2, 2**30 + 3, device=DEVICE)
    parts[:, -3:] = torch.arange(6.0, device=DEVICE).view(2, 3)
    positions = torch.tensor([[2**30 + 2, -1], [2**30, 2**30 + 1]], device=DEVICE)
    assert sum_partials(parts, positions).tolist() == [[7, 0], [3, 5]]
    assert list(itertools.chain(*sum_partials(parts[:, -3:].contiguous(), positions - 2**30).tolist())) == [7, 0, 3, 5]


def test_the_matrix_of_an_expert_has_fewer_than_2_31_elements():
    """Kernels compute offsets inside a matrix in 32 bits. Those of all weights may be larger."""
    box = 1, 16, 16
    weights_argument(torch.empty(3, 2**16, 2**15 - 1, device="meta"), box, False)
    with pytest.raises(ValueError, match=r"must have fewer than 2\^31 elements: got 65536 x 32768"):
        weights_argument(torch.empty(1, 2**16, 2**15, device="meta"), box, False)
