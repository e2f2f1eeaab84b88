"""Tokens are drawn from the softmax over the tokens that remain after top-k and top-p."""

import math

import pytest
import torch

from moe_dualpipe.inference.sampling import Sampling, filtered, generators


def expected(probabilities, top_k, top_p):
    """The distribution of one row after top-k and top-p: sort, cut twice, renormalize."""
    most_likely = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    most_likely = most_likely[:top_k]
    total, nucleus, covered = sum(probabilities[t] for t in most_likely), [], 0.0
    for token in most_likely:
        if covered < top_p * total:
            nucleus.append(token)
        covered += probabilities[token]
    share = sum(probabilities[t] for t in nucleus)
    return [probabilities[t] / share if t in nucleus else 0.0 for t in range(len(probabilities))]


@pytest.mark.parametrize("top_k", [None, 1, 3, 50])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.77, 1.0])
def test_top_k_and_top_p_equal_a_loop(top_k, top_p):
    logits = 2 * torch.randn(7, 23, dtype=torch.float64, generator=torch.Generator().manual_seed(top_k or 0))
    left = filtered(logits, top_k, top_p)
    for row, kept in zip(logits.softmax(-1).tolist(), left.softmax(-1), strict=True):
        torch.testing.assert_close(kept, torch.tensor(expected(row, top_k, top_p), dtype=torch.float64))
    assert torch.equal(left[left > -math.inf], logits[left > -math.inf])


def test_of_equal_tokens_the_first_are_kept():
    assert filtered(torch.zeros(1, 300), top_k=2).isfinite()[0].nonzero().flatten().tolist() == [0, 1]
    assert filtered(torch.zeros(1, 4), top_p=0.5).isfinite().tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("sampling,decimals", [
    (Sampling(1e-320), 9), (Sampling(1e-9, top_p=0.9), 9),
    (Sampling(0.7, top_k=1), 1), (Sampling(3.0, top_p=1e-300), 1),  # also with ties
])  # fmt: skip
def test_a_temperature_near_0_and_a_single_candidate_are_greedy(sampling, decimals):
    logits = 100 * torch.randn(200, 31, dtype=torch.float64).round(decimals=decimals)
    random = generators(0, 200)
    assert torch.equal(sampling.draw(logits, random), Sampling(0).draw(logits, random))


@pytest.mark.parametrize(
    "sampling", [Sampling(0.5), Sampling(0.5, 3), Sampling(2.0, None, 0.8), Sampling(2.0, 3, 0.7)], ids=str
)
@pytest.mark.quick("Sampling(temperature=0.5, top_k=None, top_p=1.0)", "Sampling(temperature=2.0, top_k=3, top_p=0.7)")
def test_tokens_are_drawn_with_their_probabilities(sampling):
    logits, count = torch.tensor([0.3, 1.0, -0.4, 2.0, 0.9]), 20_000
    counts = sampling.draw(logits.expand(count, 5), [torch.Generator().manual_seed(0)] * count).bincount(minlength=5)
    likely = torch.tensor(
        expected((logits / sampling.temperature).softmax(-1).tolist(), sampling.top_k, sampling.top_p)
    )
    assert not counts[likely == 0].any()
    torch.testing.assert_close(counts / count, likely, atol=0.012, rtol=0)


def test_the_numbers_of_a_text_do_not_depend_on_other_texts():
    """Text 2 of 5 draws the same tokens alone, and whether or not others draw."""
    logits, whole, alone = torch.randn(6, 5, 23), generators(3, 5), generators(3, 1, first=2)
    for step, row in enumerate(logits):
        got = Sampling(1.0).draw(row, whole, [i == 2 or (step + i) % 3 == 0 for i in range(5)])
        assert got[2] == Sampling(1.0).draw(row[2:3], alone)[0]
    assert len({one.initial_seed() for one in [*generators(3, 5), *generators(4, 5)]}) == 10


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(0.5), Sampling(0.5, 2, 0.5)], ids=str)
@pytest.mark.parametrize("logits", [[1.0, math.nan], [1.0, math.inf], [-math.inf, -math.inf]])
def test_logits_that_are_not_finite_are_an_error(sampling, logits):
    with pytest.raises(ValueError, match="the model gives logits that are not finite"):
        sampling.draw(torch.tensor([[0.0, 1.0], logits]), generators(0, 2))
    assert sampling.draw(torch.tensor([[-math.inf, 1.0]]), generators(0, 1)).tolist() == [1]  # a banned token


@pytest.mark.parametrize("wrong,message", [
    ({"temperature": -0.1}, "temperature must be at least 0: got -0.1; 0 is greedy decoding"),
    ({"temperature": math.nan}, "temperature must be at least 0: got nan"),
    ({"top_k": -1}, "top_k must be at least 1: got -1"),
    ({"top_k": 0}, "top_k must be at least 1: got 0"),
    ({"top_p": 0.0}, "top_p must be above 0, and at most 1: got 0.0"),
    ({"top_p": 1.01}, "top_p must be above 0, and at most 1: got 1.01"),
    ({"top_p": math.nan}, "top_p must be above 0, and at most 1: got nan"),
], ids=str)  # fmt: skip
def test_invalid_values_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**wrong)
