"""Symmetric gives the results of AllToAll bit for bit, between processes that run its kernels in the interpreter.

All memory that no kernel has written is NaN: the windows before their first use, and the rows past the received ones.
"""

import pytest

pytest.importorskip("triton")

from tests.support.ranks import run_ranks
from tests.support.symmetric_ranks import layers_agree, needs_interpreter, rounds


@needs_interpreter
@pytest.mark.parametrize("ranks,seeds", [(2, range(2)), *((ranks, range(100, 130)) for ranks in (1, 2, 4))])
@pytest.mark.quick("2-seeds0")
def test_results_are_those_of_all_to_all_bit_for_bit(ranks, seeds):
    run_ranks(ranks, rounds, ranks, seeds, timeout=600)


@needs_interpreter
@pytest.mark.quick("ours")
@pytest.mark.parametrize("choices", [{}, {"experts": "tests.support.kernels:LinearExperts"}], ids=["ours", "custom"])
def test_a_layer_and_its_gradients_equal_those_of_all_to_all(choices):
    run_ranks(2, layers_agree, choices)
