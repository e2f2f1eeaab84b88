"""Router losses: values against loops, gradients against a plain model that adds the losses to its loss."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from moe_dualpipe.expert_parallel import AllToAll, Local
from moe_dualpipe.models import ModelConfig, MoE, StageOptions, build_model, next_token_loss
from moe_dualpipe.models.config import RECOMPUTE
from moe_dualpipe.models.router import Router
from tests.support.oracles import moe_oracle
from tests.support.ranks import run_ranks
from tests.support.routers import CONFIG, KINDS, D, E, K, made, with_choices

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


@pytest.mark.parametrize("choices", [*KINDS[:5], {"sequence_loss": 0.0}, {"z_loss": 0.0}], ids=str)
def test_losses_equal_loops_and_change_no_output(choices):
    config = with_choices(**choices)
    router = made(Router(config))
    x = torch.randn(2, 7, D, dtype=torch.float64)
    weights, ids, losses = router(x)
    balance, z = loss_values(router.logits(x), config)
    expected = [value for value, factor in ((balance, config.sequence_loss), (z, config.z_loss)) if factor]
    torch.testing.assert_close(losses, torch.stack(expected).detach(), rtol=1e-12, atol=0)
    assert not losses.requires_grad
    without = Router(dataclasses.replace(config, sequence_loss=0.0, z_loss=0.0)).double()
    without.load_state_dict(router.state_dict())
    plain = without(x)
    assert len(plain) == 2
    assert torch.equal(weights, plain[0]) and torch.equal(ids, plain[1])
    with torch.no_grad():
        assert len(router(x)) == 2


def test_the_second_last_dimension_is_the_sequence():
    """An input [T, D] is one sequence."""
    layer = MoE(CONFIG, Local(E), 1).double()
    x = torch.randn(2, 3, 5, D, dtype=torch.float64)
    for shape, sequences in [((2, 3, 5, D), 6), ((6, 5, D), 6), ((2, 15, D), 2), ((30, D), 1)]:
        assert layer(x.view(shape)).shape == shape
        losses, _ = layer.take_losses()
        expected = loss_values(layer.router.logits(x).reshape(sequences, -1, E), CONFIG)
        torch.testing.assert_close(losses, torch.stack(expected).detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["sequence_loss", "z_loss"])
def test_negative_factors_are_refused(name):
    for wrong in (-0.1, math.nan):
        with pytest.raises(ValueError, match=f"{name} must be at least 0: got {wrong}"):
            with_choices(**{name: wrong})


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


def oracle_of(config: ModelConfig, seeds: tuple[int, ...]) -> tuple[dict[str, Tensor | None], Tensor]:
    """Gradients and losses by layer of the same model over several batches, without `attach`."""
    model, values = oracle_model(dataclasses.replace(config, sequence_loss=0.0, z_loss=0.0)), []
    model.config = config
    for seed in seeds:
        total, each = plain_loss(model, *batch(seed))
        total.backward()
        values.append(each)
    return {name: p.grad for name, p in model.named_parameters()}, total_of(values)


def oracle_model(config: ModelConfig, *args, **options):
    model = build_model(config, *args, options=StageOptions(seed=2, **options)).double()
    for module in model.modules():
        if isinstance(module, Router):
            made(module)
    return model


def moe_layers(model) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


def check(model, expected: dict[str, Tensor | None], values_LL: Tensor, chunks: int) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-12, msg=name)
    for layer, values in zip(moe_layers(model), values_LL, strict=True):
        total, decisions = layer.take_losses()
        assert decisions == chunks
        torch.testing.assert_close(total, values, rtol=1e-12, atol=0)
        assert layer.take_load().sum() == chunks * 10 * K


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("choices", [KINDS[0], KINDS[3]], ids=str)
@pytest.mark.quick(
    "{}-attention", "{'router_score': 'sigmoid', 'expert_groups': 4, 'top_groups': 2, 'router_bias': True}-full"
)
def test_gradients_equal_those_of_a_plain_model_that_adds_the_losses(choices, recompute):
    """One chunk alone, then a forward overlapped with the backward of another chunk."""
    config = with_choices(**choices)
    expected, values = oracle_of(config, (1,))
    model = oracle_model(config, Local(E), recompute=recompute)
    loss = next_token_loss(model(batch(1)[0]), batch(1)[1])
    loss.backward()
    check(model, expected, values, 1)

    model.zero_grad()
    expected, values = oracle_of(config, (1, 4))
    loss1 = next_token_loss(model(batch(1)[0]), batch(1)[1])
    assert torch.equal(loss1, loss)
    pair = model.overlapped_forward_backward
    pair(model, [batch(4)[0]], next_token_loss, [batch(4)[1]], model, loss1, None, None)[1].backward()
    check(model, expected, values, 2)


def spread_gradients(rank):
    model = oracle_model(CONFIG, AllToAll(E, torch.distributed.group.WORLD))
    next_token_loss(model(batch(rank)[0]), batch(rank)[1]).backward()
    losses = torch.stack([torch.as_tensor(layer.take_losses()[0]) for layer in moe_layers(model)])
    return {name: p.grad.numpy() for name, p in model.named_parameters()}, losses.numpy()


def test_gradients_of_expert_parallel_ranks_add_up_to_those_of_the_plain_model():
    (expected, values), ranks = oracle_of(CONFIG, (0, 1)), run_ranks(2, spread_gradients)
    for name, grad in expected.items():
        parts = [torch.from_numpy(grads[name]) for grads, _ in ranks]
        ours = torch.cat(parts) if ".experts." in name else sum(parts)
        torch.testing.assert_close(ours, grad, rtol=1e-9, atol=1e-12, msg=name)
    of_layers = torch.from_numpy(sum(losses for _, losses in ranks))
    torch.testing.assert_close(of_layers, values, rtol=1e-12, atol=0)


def test_losses_of_a_bf16_router_are_computed_in_fp32():
    """Near 50, bf16 has steps of 0.25, and the gradient of a mean over tokens is small."""
    router = Router(with_choices(sequence_loss=0.5, z_loss=0.01)).bfloat16()
    x = torch.randn(4, 33, D).bfloat16()
    weights, _, losses = router(x)
    (0 * weights).sum().backward()
    logits = router.logits(x).detach().double().requires_grad_()
    values = torch.stack(loss_values(logits, CONFIG))
    (values * torch.tensor([0.5, 0.01])).sum().backward()
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, values.float(), rtol=1e-5, atol=0)
    # The gradient of each logit is rounded to bf16 once.
    expected = torch.einsum("bse,bsd->ed", logits.grad, x.double())
    assert (router.logits.weight.grad - expected).norm() < 2**-8 * expected.norm()
