"""The checksum that replicas compare, and exact sums: every bit counts, and neither order nor place matters."""

import itertools
import math

import pytest
import torch

from moe_dualpipe.runtime import checksum as checksum_module
from moe_dualpipe.runtime.checksum import BLOCK, ROWS, checksum
from moe_dualpipe.runtime.exact_sum import from_words, to_words

SMALL = [torch.float64, torch.float8_e4m3fn, torch.complex64, torch.int16, torch.bool]
CASES = [*((dtype, range(1, 8), ROWS) for dtype in SMALL)]
CASES += [(dtype, None, rows) for dtype in (torch.float32, torch.bfloat16) for rows in (ROWS, 3)]


def random_bytes(size, dtype):
    generator = torch.Generator().manual_seed(size)
    return torch.randint(256, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("dtype,sizes,rows", CASES, ids=str)
@pytest.mark.quick(
    "torch.float32-None-3", "torch.bfloat16-None-16", "torch.float8_e4m3fn-range(1, 8)-16",
    "torch.int16-range(1, 8)-16", "torch.complex64-range(1, 8)-16", "torch.bool-range(1, 8)-16",
)  # fmt: skip
def test_a_flip_of_any_bit_changes_the_checksum(dtype, sizes, rows, monkeypatch):
    """Of all elements of a small tensor, and next to all boundaries of a large one, however many rows are read."""
    in_row = BLOCK * 4 // dtype.itemsize
    near = (0, 1, in_row - 1, in_row, in_row * rows - 1, in_row * rows)
    for size in sizes or (in_row - 1, in_row, in_row + 1, 4 * in_row + 1, in_row * (ROWS + 1) + 3):
        data = random_bytes(size, dtype)  # all patterns, NaNs included
        x = data.view(dtype)
        before = checksum(x)
        with monkeypatch.context() as patch:
            patch.setattr(checksum_module, "ROWS", rows)
            assert checksum(x) == before
            for place in {*range(min(size, 7)), *(p for p in (*near, size // 2, size - 2, size - 1) if 0 <= p < size)}:
                for bit in range(8 * dtype.itemsize):
                    data[place * dtype.itemsize + bit // 8] ^= 1 << bit % 8
                    assert checksum(x) != before, (size, place, bit)
                    data[place * dtype.itemsize + bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_the_checksum_depends_on_the_values_alone_wherever_they_are_in_memory(dtype):
    data = random_bytes(15 * 17, dtype)
    x = data.view(dtype).view(15, 17)
    for view in (x.T, x[:, 1:], x[1:, ::2], x[3:4, 5:6], x[2], x[:, 3], x[4, 6], x.view(-1)[7:]):
        before = checksum(view)
        assert before == checksum(view.contiguous().clone()), view.shape
        data ^= 255  # every bit of every element
        assert checksum(view) != before, view.shape
        data ^= 255
    assert checksum(x[:0]) == 0 and checksum(torch.nn.Parameter(x)) == checksum(x)


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
    for first, step, count in itertools.product((0, 1, 3), (1, 2, 64), (2, 4, 300, BLOCK)):
        for mask in (0x80, 0x40, 0xC0):
            changed = x.clone()
            changed.view(torch.uint8)[dtype.itemsize * (first + 1) - 1 :: dtype.itemsize * step][:count] ^= mask
            assert checksum(changed) != checksum(x), (first, step, count, mask)


SPREAD = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-44, 38, 1000)


@pytest.mark.parametrize("values", [
    SPREAD, torch.tensor([1.0, 2.0**-149, 2.0**-126]), torch.full((300,), 3.4e38), torch.zeros(0), torch.zeros(2),
])  # fmt: skip
def test_sums_are_exact_however_they_are_ordered_and_divided(values):
    assert from_words(to_words(values)).item() == math.fsum(values.double().tolist())
    shuffled = values[torch.randperm(len(values))]
    parts = [to_words(part) for part in shuffled.tensor_split([1, 7, 300])]
    assert torch.equal(sum(parts[1:], parts[0]), to_words(values))


def test_numbers_that_are_not_finite():
    infinite, wrong = to_words(torch.tensor([1.0, math.inf])), to_words(torch.tensor([math.nan, 2.0]))
    assert from_words(infinite) == math.inf and from_words(infinite + infinite) == math.inf
    assert from_words(wrong).isnan() and from_words(wrong + infinite).isnan()
