"""Two micro-batches side by side give what one batch gives."""

import dataclasses

import pytest
import torch
from ranks import run_ranks
from torch.distributed import group

from moe_dualpipe.expert_parallel import AllToAll, Loopback
from moe_dualpipe.models import ModelConfig, StageSpec, TransformerStage, build_model
from moe_dualpipe.models.inference import generate, prefill, sample
from moe_dualpipe.overlap.chunk import engine_for

CONFIG = ModelConfig(
    vocab_size=31, hidden_size=16, num_layers=3, num_dense_layers=1, num_heads=4, num_kv_heads=2, head_dim=4,
    dense_size=24, expert_size=12, num_experts=8, experts_per_token=2, init_std=0.3,
)  # fmt: skip


@pytest.mark.parametrize("sequences", [1, 2, 5])
def test_prefill_is_the_forward_of_all_sequences(sequences):
    model = build_model(CONFIG, Loopback(8, 4))
    x = torch.randint(31, (sequences, 7))
    log = engine_for(torch.device("cpu")).log = []
    logits = prefill(model, x)
    engine_for(torch.device("cpu")).log = None
    assert not logits.requires_grad
    assert log.count("head(F)") == (2 if sequences > 1 else 1)
    if sequences > 1:  # the transfers of the one beside the computation of the other
        start = log.index("dispatch(F)")
        assert log[start : start + 4] == ["dispatch(F)", "embed(F)", "attn(F)", "mlp(F)"]
    with torch.no_grad():
        torch.testing.assert_close(logits, model(x))


def continued(model, prompt, count, window):
    """One sequence, token by token, the likeliest each time."""
    tokens = prompt.tolist()
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens[-window:]]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_generate_continues_every_prompt():
    model = build_model(CONFIG)
    prompts = torch.randint(31, (5, 4))
    expected = [continued(model, prompt, 6, 7) for prompt in prompts]
    assert generate(model, prompts, 6, max_length=7, temperature=0).tolist() == expected
    assert generate(model, prompts[:1], 6, max_length=7, temperature=0).tolist() == expected[:1]
    assert generate(model, prompts, 0, max_length=7).shape == (5, 0)


def test_temperature_draws_from_the_softmax():
    logits = torch.tensor([[0.0, 1.0, 2.0]]).expand(20_000, 3)
    counts = sample(logits, 0.5, torch.Generator().manual_seed(0)).bincount(minlength=3)
    torch.testing.assert_close(counts / 20_000, torch.tensor([0.0, 2.0, 4.0]).softmax(-1), atol=0.01, rtol=0)
    model = build_model(CONFIG)
    prompts = torch.randint(31, (2, 4))
    runs = [generate(model, prompts, 8, max_length=9, temperature=2.0, seed=seed).tolist() for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def generates_together(rank):
    whole = build_model(CONFIG, seed=2)
    spread = build_model(CONFIG, AllToAll(8, group.WORLD), seed=2)
    prompts = torch.randint(31, (2, 3 + rank), generator=torch.Generator().manual_seed(rank))
    ours = generate(spread, prompts, 5, max_length=6, temperature=0)
    assert ours.tolist() == generate(whole, prompts, 5, max_length=6, temperature=0).tolist()


def test_generate_over_expert_parallel_ranks():
    run_ranks(2, generates_together)


def test_what_cannot_generate():
    middle = TransformerStage(dataclasses.replace(CONFIG), StageSpec(range(1, 3), False, False, 0.5))
    with pytest.raises(ValueError, match="needs a whole model, from embedding to head: got a stage with layers 1-2"):
        generate(middle, torch.zeros(1, 1, dtype=torch.int64), 1, 8)
    with pytest.raises(ValueError, match=r"prompts \[B, S\] of at least one token: got \[2, 0\]"):
        generate(build_model(CONFIG), torch.zeros(2, 0, dtype=torch.int64), 1, 8)
