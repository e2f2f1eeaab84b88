"""Symmetric gives the results of AllToAll bit for bit, between processes that run its kernels in the interpreter.

All memory that no kernel has written is NaN: the windows before their first use, and the rows past the received ones.
"""

import pytest

pytest.importorskip("triton")

from moe_dualpipe.expert_parallel import choose
from tests.machines.interpreter import prepare_rank
from tests.support.ranks import run_ranks
from tests.support.runs import losses, records, settings, train_and_listen
from tests.support.symmetric_ranks import layers_agree, needs_interpreter, rounds


@needs_interpreter
@pytest.mark.parametrize("sync", ["barrier", "flags"])
@pytest.mark.parametrize("ranks,seeds", [(2, range(2)), *((ranks, range(100, 130)) for ranks in (1, 2, 4))])
@pytest.mark.quick("2-seeds0-flags")
def test_results_are_those_of_all_to_all_bit_for_bit(ranks, seeds, sync):
    run_ranks(ranks, rounds, ranks, sync, seeds, timeout=600)


@needs_interpreter
@pytest.mark.quick("ours")
@pytest.mark.parametrize("choices", [{}, {"experts": "tests.support.kernels:LinearExperts"}], ids=["ours", "custom"])
def test_a_layer_and_its_gradients_equal_those_of_all_to_all(choices):
    run_ranks(2, layers_agree, choices)


def train_with(rank, backend, config):
    """A training run with `backend`, which choose.py takes for GPUs only."""
    prepare_rank(pytest.MonkeyPatch())
    pytest.MonkeyPatch().setattr(choose, "decide", lambda _name, _facts: (backend, "as requested"))
    return train_and_listen(rank, config)


@needs_interpreter
@pytest.mark.long
def test_a_training_run_gives_the_losses_of_all_to_all(tmp_path):
    found = {}
    for backend in ("all_to_all", "symmetric"):
        config = settings(tmp_path / backend, pp=1, ep=2, seq_len=8, micro_batch_size=1, steps=2)
        printed = run_ranks(2, train_with, backend, config, timeout=600)[0]
        assert f"dispatch and combine: {backend} (as requested)\n" in printed
        found[backend] = losses(records(config.checkpoint.out))
    assert len(found["symmetric"]) == 2 and found["symmetric"] == found["all_to_all"]
