"""Exact sums: equal to Python's, for numbers of any size, in any order and division."""

import math

import pytest
import torch

from moe_dualpipe.runtime.exact_sum import from_words, to_words

SPREAD = torch.rand(1000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-44, 38, 1000)


@pytest.mark.parametrize("values", [
    SPREAD, torch.tensor([1.0, 2.0**-149, 2.0**-126]), torch.full((300,), 3.4e38), torch.zeros(0), torch.zeros(2),
])  # fmt: skip
def test_sums_are_exact(values):
    assert from_words(to_words(values)).item() == math.fsum(values.double().tolist())


def test_the_order_and_the_division_change_no_bit():
    words = to_words(SPREAD)
    shuffled = SPREAD[torch.randperm(1000, generator=torch.Generator().manual_seed(1))]
    parts = [to_words(part) for part in shuffled.split([1, 7, 300, 692])]
    assert torch.equal(sum(parts[1:], parts[0]), words)
    assert from_words(words) > SPREAD.double().max()


def test_numbers_that_are_not_finite():
    infinite, wrong = to_words(torch.tensor([1.0, math.inf])), to_words(torch.tensor([math.nan, 2.0]))
    assert from_words(infinite) == math.inf and from_words(infinite + infinite) == math.inf
    assert from_words(wrong).isnan() and from_words(wrong + infinite).isnan()
