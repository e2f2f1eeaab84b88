"""Router losses: values against loops, gradients against a plain model that adds the losses to its loss."""

import dataclasses

import pytest
import torch
from torch import Tensor

from moe_dualpipe.models import ModelConfig, MoE, StageOptions, build_model, next_token_loss
from moe_dualpipe.models.router import Router
from tests.support.oracles import moe_oracle
from tests.support.routers import CONFIG, KINDS, D, made, with_choices

# ---- The losses ----


def total_of(tensors: list[Tensor]) -> Tensor:
    return sum(tensors[1:], tensors[0])


def loss_values(logits_BSE: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """The sequence-wise loss and the z-loss, without their factors, in a loop over sequences and tokens."""
    balance, squares = [], []
    k, num_experts = config.experts_per_token, config.num_experts
    for logits_SE in logits_BSE:
        chosen, totals = [0] * num_experts, [torch.zeros(())] * num_experts
        for logits_E in logits_SE:
            scores = [v.exp() if config.router_score == "softmax" else 1 / (1 + (-v).exp()) for v in logits_E]
            for e in sorted(range(num_experts), key=lambda e: -scores[e].item())[:k]:
                chosen[e] += 1
            totals = [total + score / sum(scores) for total, score in zip(totals, scores, strict=True)]
            squares.append(total_of([v.exp() for v in logits_E]).log() ** 2)
        length = len(logits_SE)
        pairs = zip(chosen, totals, strict=True)
        balance.append(total_of([num_experts / (k * length) * f * (p / length) for f, p in pairs]))
    return total_of(balance) / len(balance), total_of(squares) / len(squares)


@pytest.mark.parametrize("choices,dtype,of_losses,of_grads", [
    *((choices, torch.float64, 1e-12, 1e-12) for choices in [*KINDS[:5], {"sequence_loss": 0.0}, {"z_loss": 0.0}]),
    ({"sequence_loss": 0.5, "z_loss": 0.01}, torch.bfloat16, 1e-5, 2**-8),
], ids=str)  # fmt: skip
def test_losses_and_their_gradients_equal_loops_and_change_no_output(choices, dtype, of_losses, of_grads):
    """In bf16, losses are computed in fp32, and the gradient of each logit is rounded once."""
    config = with_choices(**choices)
    router = made(Router(config)).to(dtype)
    x = torch.randn(4, 33, D, dtype=dtype)
    weights, ids, losses = router(x)
    (0 * weights).sum().backward()
    logits = router.logits(x).detach().double().requires_grad_()
    factors = torch.tensor([config.sequence_loss, config.z_loss], dtype=torch.float64)
    values = torch.stack(loss_values(logits, config))
    (values * factors).sum().backward()
    expected = values[factors > 0].detach().to(losses.dtype)
    torch.testing.assert_close(losses, expected, rtol=of_losses, atol=0)
    grad = torch.einsum("bse,bsd->ed", logits.grad, x.double())
    assert (router.logits.weight.grad - grad).norm() <= of_grads * grad.norm()
    assert losses.dtype == torch.promote_types(dtype, torch.float32)
    without = Router(dataclasses.replace(config, sequence_loss=0.0, z_loss=0.0)).to(dtype)
    without.load_state_dict(router.state_dict())
    assert all(map(torch.equal, without(x), (weights, ids)))


# ---- In a model ----


def batch(seed: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(CONFIG.vocab_size, (2, 2, 5), generator=torch.Generator().manual_seed(seed))
    return tokens[0], tokens[1]


def plain_loss(model, x_BS: Tensor, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy plus all router losses, with plain autograd, and the losses by layer, without factors."""
    x, config, total, values = model.embedding(x_BS), model.config, 0.0, []
    for block in model.layers.values():
        h = x + block.attention(block.attention_norm(x))
        normal = block.mlp_norm(h)
        if isinstance(block.mlp, MoE):
            values.append(torch.stack(loss_values(normal @ block.mlp.router.logits.weight.T, config)))
            total = total + config.sequence_loss * values[-1][0] + config.z_loss * values[-1][1]
            x = h + moe_oracle(block.mlp, normal.flatten(0, 1)).view_as(h)
        else:
            x = h + block.mlp(normal)
    return next_token_loss(model.head(model.norm(x)), labels_BS) + total, torch.stack(values).detach()


def test_gradients_equal_those_of_a_plain_model_that_adds_the_losses():
    model, plain = (
        build_model(config, options=StageOptions(seed=2)).double()
        for config in (CONFIG, dataclasses.replace(CONFIG, sequence_loss=0.0, z_loss=0.0))
    )
    plain.config, values = CONFIG, []
    for seed in (1, 4):
        next_token_loss(model(batch(seed)[0]), batch(seed)[1]).backward()
        total, each = plain_loss(plain, *batch(seed))
        total.backward()
        values.append(each)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12, msg=name)
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    for layer, expected in zip(layers, total_of(values), strict=True):
        total, decisions = layer.take_losses()
        assert decisions == 2
        torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
