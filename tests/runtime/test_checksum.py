"""The checksum that replicas compare: every bit of a tensor counts, and its place in memory does not."""

import itertools

import pytest
import torch

from moe_dualpipe.runtime import checksum as checksum_module
from moe_dualpipe.runtime.checksum import BLOCK, ROWS, checksum

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.int64,
    torch.int32, torch.int16, torch.uint8, torch.bool,
]  # fmt: skip


def random_bytes(size, dtype):
    generator = torch.Generator().manual_seed(size)
    return torch.randint(256, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8)


def flip(data, bit):
    data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_flip_of_any_bit_of_any_element_changes_the_checksum(dtype):
    for size in (1, 2, 3, 4, 5, 7):
        data = random_bytes(size, dtype)  # all patterns, NaNs included
        x = data.view(dtype)
        before = checksum(x)
        for bit in range(8 * len(data)):
            flip(data, bit)
            assert checksum(x) != before, (size, bit)
            flip(data, bit)
        assert checksum(x) == before


@pytest.mark.parametrize("rows", [ROWS, 3])  # as on a CPU, and another number of rows at a time
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_flip_next_to_any_boundary_changes_the_checksum(dtype, rows, monkeypatch):
    in_row = BLOCK * 4 // dtype.itemsize
    whole = {size: checksum(random_bytes(size, dtype).view(dtype)) for size in (in_row * ROWS, 4 * in_row + 1)}
    monkeypatch.setattr(checksum_module, "ROWS", rows)
    for size in (in_row - 1, in_row, in_row + 1, 4 * in_row + 1, in_row * ROWS, in_row * (ROWS + 1) + 3):
        data = random_bytes(size, dtype)
        x = data.view(dtype)
        before = checksum(x)
        assert size not in whole or before == whole[size]
        for place in (0, 1, in_row - 1, in_row, in_row * rows - 1, in_row * rows, size // 2, size - 2, size - 1):
            for bit in range(8 * dtype.itemsize) if place < size else ():
                flip(data, 8 * dtype.itemsize * place + bit)
                assert checksum(x) != before, (size, place, bit)
                flip(data, 8 * dtype.itemsize * place + bit)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_the_checksum_depends_on_the_values_alone_wherever_they_are_in_memory(dtype):
    data = random_bytes(15 * 17, dtype)
    x = data.view(dtype).view(15, 17)
    bits = data.view(15, -1)
    for view in (x.T, x[:, 1:], x[1:, ::2], x[3:4, 5:6], x[2], x[:, 3], x[:0], x[4, 6], x.view(-1)[7:]):
        assert checksum(view) == checksum(view.contiguous().clone()), view.shape
        before = checksum(view)
        bits ^= 255  # every bit of every element
        assert (checksum(view) != before) == (view.numel() > 0), view.shape
        bits ^= 255
    assert checksum(x[:0]) == 0
    assert checksum(torch.nn.Parameter(x)) == checksum(x)


def test_equal_changes_do_not_cancel_and_order_matters():
    """For example, the weights of a norm are equal, and all of them may drift by the same amount."""
    ones = torch.ones(2 * BLOCK * 3 * ROWS)
    assert checksum(ones) != checksum(2 * ones)
    x = torch.arange(4.0 * BLOCK)
    assert checksum(x) != checksum(x.view(2, -1).flip(0).flatten())
    assert checksum(x) != checksum(x.view(-1, 2, 2).flip(1).flatten())
    rows = x.view(-1, BLOCK)
    mirrored = rows.clone()
    mirrored[1, 2], mirrored[2, 1] = rows[2, 1], rows[1, 2]
    assert checksum(rows) != checksum(mirrored)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_changes_of_the_highest_bits_do_not_cancel(dtype):
    x = random_bytes(2 * BLOCK, dtype).view(dtype)
    for first, step, count in itertools.product((0, 1, 3), (1, 2, 4, 64), (2, 4, 8, 300, BLOCK)):
        changed = x.clone()
        high = changed.view(torch.uint8)[dtype.itemsize * (first + 1) - 1 :: dtype.itemsize * step][:count]
        for mask in (0x80, 0x40, 0xC0):
            high ^= mask
            assert checksum(changed) != checksum(x), (first, step, count, mask)
            high ^= mask
