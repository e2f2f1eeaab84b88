"""Multi-token prediction (MTP) against plain loops. It must not change the rest of the model."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from moe_dualpipe.kernels.cross_entropy import linear_cross_entropy
from moe_dualpipe.models import (
    ModelConfig,
    StageOptions,
    TransformerStage,
    build_model,
    share_embedding,
    split,
    transformer,
)
from tests.support.ranks import cosine_distance

CONFIG = ModelConfig(
    vocab_size=61, hidden_size=16, num_layers=3, num_dense_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
    dense_size=24, expert_size=12, num_experts=4, experts_per_token=2, init_std=0.2, mtp_layers=2, mtp_weight=0.7,
)  # fmt: skip
OFF = replace(CONFIG, mtp_layers=0)
B, S = 2, 7


def batch(seed=1):
    """Tokens [B, S + 1]: inputs are all but the last, labels all but the first."""
    return torch.randint(CONFIG.vocab_size, (B, S + 1), generator=torch.Generator().manual_seed(seed))


def step(model, tokens_BL):
    loss = model.loss(model(tokens_BL[:, :-1]), tokens_BL[:, 1:])
    loss.backward()
    return loss.detach()


def grads_of(model):
    return {name: p.grad for name, p in model.named_parameters()}


def trained(config=CONFIG, dtype=torch.float32, **choices):
    model = build_model(config, options=StageOptions(seed=3, **choices)).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:  # norms are initialized to ones, which would hide a missing or exchanged norm
                p.copy_(torch.linspace(0.5, 1.5, p.numel()) * (1 + len(p) % 3))
        for i, p in enumerate(p for n, p in model.named_parameters() if n.startswith("mtp") and p.ndim == 1):
            p.mul_(1 + 0.1 * i)
    return model


# ---- The oracle ----


def normalized(x_D, norm):
    return x_D / (x_D.square().mean() + CONFIG.norm_eps).sqrt() * norm.weight


def nll(model, x_D, norm, token):
    """-log p(token) of a hidden state, which is normalized first if `norm` is given."""
    x_D = normalized(x_D, norm) if norm is not None else x_D
    logits_V = model.head.weight @ x_D
    return logits_V.exp().sum().log() - logits_V[token]


def oracle(model, tokens_BL):
    """The losses of the tokens 1, 2 ... positions after each position, in a loop over positions."""
    weight, length = model.embedding.weight, tokens_BL.shape[1]
    h_BSD = model(tokens_BL[:, :-1])
    losses = [
        torch.stack([
            nll(model, h_BSD[b, i], None, tokens_BL[b, i + 1]) for b in range(B) for i in range(length - 1)
        ]).mean()
    ]  # fmt: skip
    for k, module in enumerate(model.mtp.children(), start=1):
        positions = [(b, i) for b in range(B) for i in range(length - 1 - k)]
        pairs = [
            (normalized(h_BSD[b, i], module.hidden_norm), normalized(weight[tokens_BL[b, i + k]], module.token_norm))
            for b, i in positions
        ]
        rows_TD = torch.stack([module.join.weight @ torch.cat(pair) for pair in pairs])
        h_BSD = module.block(rows_TD.view(B, length - 1 - k, -1))
        ahead = [nll(model, h_BSD[b, i], module.norm, tokens_BL[b, i + k + 1]) for b, i in positions]
        losses.append(torch.stack(ahead).mean())
    return losses


@pytest.mark.parametrize("mtp_layers,num_dense_layers,fused_loss,tied", [
    (1, 1, False, False), (2, 1, True, True), (3, 3, False, True)
])  # fmt: skip
def test_losses_and_gradients_are_those_of_an_oracle(monkeypatch, mtp_layers, num_dense_layers, fused_loss, tied):
    """Also if the embedding is the weight of the head: it gets the gradients of all its uses."""
    monkeypatch.setattr(transformer, "linear_cross_entropy", partial(linear_cross_entropy, chunk_tokens=5))
    config = replace(CONFIG, mtp_layers=mtp_layers, num_dense_layers=num_dense_layers, tied_embeddings=tied)
    model, same = (trained(config, torch.float64, fused_loss=fused_loss) for _ in range(2))
    loss = step(model, batch())
    expected, *ahead = oracle(same, batch())
    (expected + CONFIG.mtp_weight / mtp_layers * sum(ahead)).backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=0)
    means = [model.mtp.take_loss()]
    torch.testing.assert_close(means[0], torch.stack(ahead).mean().detach(), rtol=1e-13, atol=0)
    for name, grad in grads_of(model).items():
        other = same.get_parameter(name).grad
        assert cosine_distance(grad, other) < 1e-13, name
        torch.testing.assert_close(grad.norm(), other.norm(), rtol=1e-10, atol=0)
    for seeds in ((2,), (1, 2)):
        [step(model, batch(seed)) for seed in seeds]
        means.append(model.mtp.take_loss())
    torch.testing.assert_close(means[2], (means[0] + means[1]) / 2, rtol=1e-13, atol=0)


# ---- The rest of the model ----


def test_mtp_changes_neither_weights_nor_loss_nor_text_of_the_model(monkeypatch):
    generate = pytest.importorskip("moe_dualpipe.inference").generate
    model, plain = (build_model(config, options=StageOptions(seed=3)) for config in (CONFIG, OFF))
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    tokens_BL = batch()
    expected = step(plain, tokens_BL)
    assert torch.equal(step(model, tokens_BL), expected)
    model.mtp.take_loss()
    monkeypatch.setattr(model.mtp, "segments", None)  # it does not run without gradients
    with torch.no_grad():
        assert torch.equal(model.loss(model(tokens_BL[:, :-1]), tokens_BL[:, 1:]), expected)
    assert model.mtp.take_loss().isnan()
    assert torch.equal(generate(model, tokens_BL, 3, 9, seed=1), generate(plain, tokens_BL, 3, 9, seed=1))


@pytest.mark.parametrize("tied", [False, True])
def test_first_and_last_stage_share_one_embedding_also_after_to(tied):
    config = replace(CONFIG, tied_embeddings=tied)
    specs = split(config, 3)
    stages = [TransformerStage(config, specs[i], options=StageOptions(seed=3)) for i in (0, 2)]
    assert torch.equal(stages[0].embedding.weight, stages[1].embedding.weight)
    share_embedding(stages)
    for stage in stages:
        stage.to(torch.bfloat16)
        assert stage.embedding.weight is stages[0].embedding.weight
        assert [n for n in stage.state_dict() if "embedding" in n] == ["embedding.weight"]
    assert (stages[1].head.weight is stages[0].embedding.weight) == tied


def test_short_sequences_are_refused():
    with pytest.raises(ValueError, match="mtp_layers 2 needs sequences of at least 3 tokens: got 2; use longer ones"):
        step(build_model(CONFIG), batch()[:, :3])
    assert step(build_model(CONFIG), batch()[:, :4]).isfinite()
