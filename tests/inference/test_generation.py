"""Generation: prefill in two halves, key/value caches, and the tokens of plain forwards.

Ranks that share experts, each with other sequences, have the tokens and losses of one process with all experts.
"""

import dataclasses

import numpy as np
import pytest
import torch
from torch.distributed import group

from moe_dualpipe.expert_parallel import AllToAll, ByChoice, Local, Loopback
from moe_dualpipe.inference import ExpertRanks, generate, prefill, stream_losses
from moe_dualpipe.models import ModelConfig, StageOptions, StageSpec, TransformerStage, build_model, filled_cache
from moe_dualpipe.overlap import Engine
from tests.support.engines import run_on
from tests.support.ranks import run_ranks

CONFIG = ModelConfig(
    vocab_size=31, hidden_size=16, num_layers=3, num_dense_layers=1, num_heads=4, num_kv_heads=2, head_dim=4,
    dense_size=24, expert_size=12, num_experts=8, experts_per_token=2, init_std=0.3,
)  # fmt: skip


@pytest.mark.parametrize("sequences", [1, 2, 5])
def test_prefill_equals_the_forward_of_all_sequences(sequences):
    model = build_model(CONFIG, Loopback(8, 4))
    x = torch.randint(31, (sequences, 7))
    log = []
    with run_on(Engine(torch.device("cpu"), log=log)):
        logits = prefill(model, x)
    assert not logits.requires_grad
    assert log.count("head(F)") == (2 if sequences > 1 else 1)
    if sequences > 1:  # the transfer of one half overlaps computation of the other
        start = log.index("dispatch(F)")
        assert log[start : start + 4] == ["dispatch(F)", "embed(F)", "attn(F)", "mlp(F)"]
    with torch.no_grad():
        torch.testing.assert_close(logits, model(x))


VARIANTS = {
    "gqa": CONFIG,
    "mla": dataclasses.replace(CONFIG, attention="mla", kv_rank=8, rope_dim=4, value_dim=6),
}


@torch.no_grad()
def continued(model, prompt, count, window):
    """Generate without a cache, from a forward of the window: always the likeliest token."""
    tokens, start = prompt.tolist(), 0
    for end in range(1, len(tokens) + count):
        if end - start > window:
            start = end - max(1, window // 2)
        if end < len(prompt):
            continue
        tokens.append(int(model.logits(model(torch.tensor([tokens[start:]])))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("fused_loss", [False, True], ids=["logits", "fused_loss"])
@pytest.mark.parametrize("attention", VARIANTS)
@pytest.mark.quick("gqa-logits", "mla-fused_loss")
def test_generate_equals_generation_without_a_cache(attention, fused_loss):
    """With a maximum length that the text never reaches, and one that it reaches several times."""
    spread = Loopback(8, 4) if fused_loss else None  # Loopback: two halves, None: one batch
    model = build_model(VARIANTS[attention], spread, options=StageOptions(fused_loss=fused_loss)).double()
    prompts = torch.randint(31, (3, 4))
    for window in (30, 7, 1):
        expected = [continued(model, prompt, 9, window) for prompt in prompts]
        assert generate(model, prompts, 9, window, temperature=0).tolist() == expected
    assert generate(model, prompts[:1], 9, window, temperature=0).tolist() == expected[:1]
    assert generate(model, prompts, 0, max_length=7).shape == (3, 0)


@pytest.mark.parametrize("attention", VARIANTS)
@pytest.mark.quick("mla")
def test_prompts_may_have_different_lengths(attention):
    model = build_model(VARIANTS[attention]).double()
    prompts = [torch.randint(31, (length,)) for length in (5, 1, 9, 5)]
    for window in (7, 15):  # the text is longer than the first two
        expected = [continued(model, prompt, 6, window) for prompt in prompts]
        for size in (None, 1, 3):
            assert generate(model, prompts, 6, window, temperature=0, batch_size=size).tolist() == expected
    stops = [row[2] for row in expected]
    for stop, row in zip(stops, expected, strict=True):
        cut = row[: row.index(stop) + 1]
        got = generate(model, prompts, 6, 15, temperature=0, stop=stop).tolist()
        assert got[expected.index(row)] == cut + [stop] * (6 - len(cut))


def test_each_token_takes_a_forward_of_one_position_and_the_same_seed_gives_the_same_text(monkeypatch):
    model, shapes, prompts = build_model(CONFIG), [], torch.randint(31, (1, 5))
    segments = type(model).segments
    monkeypatch.setattr(type(model), "segments", lambda self, x, *c: shapes.append([*x.shape]) or segments(self, x, *c))
    runs = [generate(model, prompts, 8, max_length=9, temperature=2.0, seed=seed).tolist() for seed in (1, 1, 2)]
    assert shapes == [[1, 5], *[[1, 1]] * 4, [1, 4], *[[1, 1]] * 2] * 3
    assert runs[0] == runs[1] != runs[2]


def test_a_text_ends_at_its_stop_token():
    """Ended sequences are filled with the stop token; when all have ended, computation stops."""
    model, count = build_model(CONFIG), []
    prompts = torch.randint(31, (3, 4))
    stop = int(generate(model, prompts, 40, 50, temperature=2.0)[1, 3])
    prompts[0, 1] = stop  # a stop token in a prompt does not end the sequence
    free = generate(model, prompts, 40, 50, temperature=2.0).tolist()
    for stops in ((stop,), (stop, free[0][2], 30), (free[2][9], stop)):
        ended = generate(model, prompts, 40, 50, temperature=2.0, stop=stops).tolist()
        for row, whole in zip(ended, free, strict=True):
            length = next((i + 1 for i, token in enumerate(whole) if token in stops), len(whole))
            assert row == whole[:length] + [stops[0]] * (40 - length)
    first = int(generate(model, prompts[:1], 1, 50, temperature=0))
    model.register_forward_pre_hook(lambda *_: count.append(1))
    assert generate(model, prompts[:1], 40, 50, temperature=0, stop=first).tolist() == [[first] * 40]
    assert len(count) == 1


PROMPTS = torch.zeros(2, 3, dtype=torch.int64)
REFUSED = [
    *(({"prompts": empty}, r"prompts, each \[S\] with at least one token: got \[") for empty in (
        PROMPTS[:, :0], PROMPTS[:0], PROMPTS[0], [PROMPTS[0], PROMPTS[0, :0]]
    )),
    *(({"prompts": [PROMPTS[0], PROMPTS[0, :2] + token]}, f"token ids must be from 0 to 30: got {token} in a prompt")
      for token in (31, -1)),
    ({"num_tokens": -1}, "num_tokens must be at least 0: got -1"),
    ({"max_length": 0}, "max_length must be at least 1: got 0"),
    ({"batch_size": 0}, "batch_size must be at least 1: got 0"),
    ({"model": TransformerStage(CONFIG, StageSpec(range(1, 3), False, False, 0.5))},
     "needs a whole model, from embedding to head: got a stage with layers 1-2"),
]  # fmt: skip


@pytest.mark.parametrize("changes,message", REFUSED)
def test_generate_refuses_partial_models_and_invalid_prompts(changes, message):
    given = {"model": build_model(CONFIG), "prompts": PROMPTS, "num_tokens": 1, "max_length": 8}
    with pytest.raises(ValueError, match=message):
        generate(**given | changes)


def test_a_cache_refuses_gradients_and_other_shapes():
    model, cache = build_model(CONFIG), filled_cache(CONFIG, range(3), 2, 5)
    for enabled, x, used, message in (
        (True, PROMPTS, cache, r"has no gradients: call the stage under torch.no_grad\(\)"),
        (False, PROMPTS[:1], cache, r"\[2, 2, 4\] \(sequences, heads, width\): got \[1, 2, 4\]"),
        (False, PROMPTS, filled_cache(CONFIG, range(2), 2, 5), r"5 positions of layers \[0, 1\]: got layer 2"),
    ):
        with torch.set_grad_enabled(enabled), pytest.raises(ValueError, match=message):
            model(x, cache=used)
    assert cache.length == 5


# ---- Ranks that share experts ----


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
        for shares, size, in_background in CASES[:: 1 + stopped]:
            first, end = shares[rank : rank + 2]
            pairs.clear()
            found = generate(
                spread, prompts[first:end], 5, length, temperature, seed=4, stop=stop, first=first, batch_size=size,
                ranks=ExpertRanks(in_background, group.WORLD) if size else None,
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
        found = [*stream_losses(spread, tokens, 64, stride, size, ExpertRanks(in_background, group.WORLD))]
        assert torch.equal(torch.cat(found), expected), (stride, size, in_background)
        assert [len(batch) for batch in found][1:-1] == [2 * size * stride] * (len(found) - 2)
        assert bool(pairs) == (in_background and size > 1)


def test_ranks_score_the_losses_of_one_process():
    """Bit for bit, with a last batch of which one rank has fewer windows."""
    run_ranks(2, scores_the_losses_of_one_process)


@pytest.mark.parametrize("in_background,sequences,number", [(True, 2, 2), (True, 1, 1), (False, 9, 1), (True, 0, 1)])
def test_micro_batches_take_turns_where_there_are_transfers_to_hide(in_background, sequences, number):
    assert ExpertRanks(in_background).micro_batches(sequences) == number


def test_a_model_without_ranks_that_share_its_experts_needs_no_other_rank():
    for experts, expected in ((None, 0), (Loopback(8, 4), 2)):
        model = build_model(CONFIG, experts)
        pairs = recorded_pairs(model)
        generate(model, torch.zeros(3, 4, dtype=torch.int64), 2, 9)
        assert pairs == [([2, 4], [1, 4]), ([2, 1], [1, 1])][:expected]
