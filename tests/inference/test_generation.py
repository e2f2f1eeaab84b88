"""Generation in one process: prefill in two halves, key/value caches, and the tokens of plain forwards."""

import dataclasses

import pytest
import torch

from moe_dualpipe.expert_parallel import Loopback
from moe_dualpipe.inference import generate, prefill
from moe_dualpipe.models import ModelConfig, StageOptions, StageSpec, TransformerStage, build_model, filled_cache
from moe_dualpipe.overlap.segmented import engine_for

CONFIG = ModelConfig(
    vocab_size=31, hidden_size=16, num_layers=3, num_dense_layers=1, num_heads=4, num_kv_heads=2, head_dim=4,
    dense_size=24, expert_size=12, num_experts=8, experts_per_token=2, init_std=0.3,
)  # fmt: skip


@pytest.mark.parametrize("sequences", [1, 2, 5])
def test_prefill_equals_the_forward_of_all_sequences(sequences):
    model = build_model(CONFIG, Loopback(8, 4))
    x = torch.randint(31, (sequences, 7))
    log = engine_for(torch.device("cpu")).log = []
    logits = prefill(model, x)
    engine_for(torch.device("cpu")).log = None
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
def test_prompts_may_have_different_lengths(attention):
    model = build_model(VARIANTS[attention]).double()
    prompts = [torch.randint(31, (length,)) for length in (5, 1, 9, 5)]
    for window in (7, 1, 15):  # the text is longer than the first two
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
    free, ended = (generate(model, prompts, 40, 50, temperature=2.0, stop=s).tolist() for s in (None, stop))
    for row, whole in zip(ended, free, strict=True):
        length = whole.index(stop) + 1 if stop in whole else len(whole)
        assert row == whole[:length] + [stop] * (40 - length)
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
