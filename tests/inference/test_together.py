"""Ranks that share experts, each with other sequences: the tokens and losses of one process with all experts."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.distributed import group

from moe_dualpipe.expert_parallel import AllToAll, ByChoice, Local, Loopback
from moe_dualpipe.inference import Together, generate, stream_losses
from moe_dualpipe.models import ModelConfig, StageOptions, build_model
from tests.support.ranks import run_ranks

CONFIG = ModelConfig(
    vocab_size=31, hidden_size=16, num_layers=2, num_dense_layers=1, num_heads=4, num_kv_heads=2, head_dim=4,
    dense_size=24, expert_size=12, num_experts=8, experts_per_token=2, init_std=0.3,
)  # fmt: skip
LENGTHS = 5, 3, 9, 4, 2, 7, 1
CASES = (
    ([0, 7, 7], None, True), ([0, 5, 7], 4, True), ([0, 5, 7], 3, True), ([0, 5, 7], 1, True), ([0, 1, 7], 2, False),
)  # fmt: skip
"""Where the prompts of the ranks start and end, the most texts at a time, and whether transfers go on meanwhile."""


def spread_and_whole(config=CONFIG):
    """One model with its experts on all ranks, and on each. Both add a token's experts in the order of its choices."""
    backends = ByChoice(AllToAll(8, group.WORLD)), ByChoice(Local(8))
    return [build_model(config, backend, StageOptions(seed=2)) for backend in backends]


def recorded_pairs(model):
    """The shapes of the inputs of each pair of micro-batches that `model` will run."""
    pairs, run = [], type(model).interleaved_forward

    def note(module0, inputs0, module1, inputs1):
        pairs.append(([*inputs0[0].shape], [*inputs1[0].shape]))
        return run(module0, inputs0, module1, inputs1)

    model.interleaved_forward = note
    return pairs


def generates_the_texts_of_one_process(rank):
    spread, whole = spread_and_whole()
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(31, (length,), generator=random) for length in LENGTHS]
    pairs = recorded_pairs(spread)
    for temperature, length, stopped in ((0.0, 30, False), (1.0, 6, True)):
        expected = generate(whole, prompts, 5, length, temperature, seed=4)
        stop = int(expected[2, 3]) if stopped else None
        if stopped:
            expected = generate(whole, prompts, 5, length, temperature, seed=4, stop=stop)
        for shares, size, in_background in CASES:
            first, end = shares[rank : rank + 2]
            pairs.clear()
            found = generate(
                spread, prompts[first:end], 5, length, temperature, seed=4, stop=stop, first=first, batch_size=size,
                together=Together(in_background, group.WORLD) if size else None,
            )  # fmt: skip
            assert torch.equal(found, expected[first:end]), (temperature, length, stop, shares)
            assert bool(pairs) == (in_background and size != 1)
            assert all(rows0 + rows1 <= (size or 7) for (rows0, _), (rows1, _) in pairs)
            if (size, rank, stopped) == (4, 0, False):  # the prefill of one batch runs beside the decoding of another
                assert ([2, 1], [1, 2]) in pairs


def test_ranks_generate_the_texts_of_one_process():
    """With any number of prompts on a rank, also none; with texts that end early, and that outgrow the cache.

    Without a batch size, `generate` finds the ranks that share the experts by itself.
    """
    run_ranks(2, generates_the_texts_of_one_process)


def scores_the_losses_of_one_process(_rank):
    # Wide enough, and with enough rows for each expert, that a CPU rounds a row alike with any number of other rows.
    config = dataclasses.replace(CONFIG, hidden_size=64, head_dim=16, expert_size=48)
    spread, whole = spread_and_whole(config)
    tokens = np.random.default_rng(0).integers(0, 31, 441).astype(np.uint8)
    pairs = recorded_pairs(spread)
    for stride, size, in_background in ((64, 3, True), (40, 4, True), (64, 2, False), (64, 1, True)):
        expected = torch.cat([*stream_losses(whole, tokens, 64, stride, size)])
        pairs.clear()
        found = [*stream_losses(spread, tokens, 64, stride, size, Together(in_background, group.WORLD))]
        assert torch.equal(torch.cat(found), expected), (stride, size, in_background)
        assert [len(batch) for batch in found][1:-1] == [2 * size * stride] * (len(found) - 2)
        assert bool(pairs) == (in_background and size > 1)


def test_ranks_score_the_losses_of_one_process():
    """Bit for bit, with a last batch of which one rank has fewer windows."""
    run_ranks(2, scores_the_losses_of_one_process)


@pytest.mark.parametrize("in_background,sequences,number", [(True, 2, 2), (True, 1, 1), (False, 9, 1), (True, 0, 1)])
def test_micro_batches_take_turns_where_there_are_transfers_to_hide(in_background, sequences, number):
    assert Together(in_background).micro_batches(sequences) == number


def test_a_model_without_ranks_that_share_its_experts_needs_no_other_rank():
    for experts, expected in ((None, 0), (Loopback(8, 4), 2)):
        model = build_model(CONFIG, experts)
        pairs = recorded_pairs(model)
        generate(model, torch.zeros(3, 4, dtype=torch.int64), 2, 9)
        assert pairs == [([2, 4], [1, 4]), ([2, 1], [1, 1])][:expected]
