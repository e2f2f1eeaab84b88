"""The router: precision, the bias that balances the load, balanced choices, and the losses of the router."""

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from moe_dualpipe.expert_parallel import Local
from moe_dualpipe.models import ModelConfig, MoE
from moe_dualpipe.models.router import Router, balanced_ids
from tests.support.routers import CONFIG, KINDS, D, E, K, made, with_choices

# ---- The decision ----


@pytest.mark.parametrize("choices", [{}, {"router_score": "sigmoid", "expert_groups": 8, "top_groups": 4}], ids=str)
def test_fp32_logits_choose_the_experts_that_exact_logits_choose(choices):
    x_TD, other = torch.randn(4096, 256).bfloat16(), {}
    for dtype in ("model", "float32"):
        router = Router(
            with_choices(hidden_size=256, num_experts=64, init_std=0.02, router_dtype=dtype, **choices)
        ).bfloat16()
        expected_TK = router.choose(x_TD.double() @ router.logits.weight.double().T, None)[1]
        ids_TK = router(x_TD)[1]
        other[dtype] = (ids_TK.sort().values != expected_TK.sort().values).any(-1).double().mean().item()
    assert other["float32"] == 0 < 0.005 < other["model"] < 0.1


# ---- The bias ----


def test_a_bias_stays_in_fp32_and_is_saved():
    router = Router(with_choices(router_bias=True))
    router.bias_E[0] = 0.5 + 2**-12  # not representable in bf16
    for move in (nn.Module.bfloat16, nn.Module.double, lambda m: m.to("cpu", torch.bfloat16)):
        move(router)
        assert router.bias_E.dtype == torch.float32 and router.bias_E[0] == 0.5 + 2**-12
    assert {*router.state_dict()} == {"logits.weight", "bias_E"}
    with torch.device("meta"):
        empty = Router(with_choices(router_bias=True)).bfloat16().to_empty(device="cpu")
    assert (empty.bias_E.dtype, empty.bias_E.device.type) == (torch.float32, "cpu")


def test_a_bias_moves_by_its_rate_opposite_to_the_load():
    router = Router(with_choices(num_experts=3, router_bias=True))
    router.move_bias(torch.tensor([3, 1, 2]), 0.1)
    torch.testing.assert_close(router.bias_E, torch.tensor([-0.1, 0.1, 0.0]))
    router.move_bias(torch.tensor([0, 1, 1]), 0.25)  # the mean is not an integer
    torch.testing.assert_close(router.bias_E, torch.tensor([0.15, -0.15, -0.25]))


# ---- The balanced router ----


@pytest.mark.parametrize("groups,top_groups", [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_balanced_choices_are_equally_frequent_and_far_apart(groups, top_groups):
    ids = balanced_ids(with_choices(expert_groups=groups, top_groups=top_groups), E, torch.device("cpu"))
    assert torch.bincount(ids.flatten(), minlength=E).tolist() == [K] * E
    size, of_group = E // groups, -(-K // top_groups)
    for token in ids.tolist():
        assert len({*token}) == K and len({e // size for e in token}) == min(top_groups, K)
        for e, other in itertools.combinations(token, 2):
            apart = abs(e - other)
            assert e // size != other // size or min(apart, size - apart) >= size // of_group


# ---- The losses ----


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
            squares.append(torch.stack([v.exp() for v in logits_E]).sum().log() ** 2)
        length = len(logits_SE)
        pairs = zip(chosen, totals, strict=True)
        balance.append(sum(num_experts / (k * length) * f * (p / length) for f, p in pairs))
    return torch.stack(balance).mean(), torch.stack(squares).mean()


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


def test_a_layer_adds_up_loads_and_losses_until_they_are_taken():
    """The second-last dimension is the sequence."""
    layer = MoE(CONFIG, Local(E), 1).double()
    for shape in ((2, 3, 5, D), (5, D)):
        x, sequences = torch.randn(2, *shape, dtype=torch.float64), math.prod(shape[:-2])
        logits = [layer.router.logits(each).detach().view(sequences, -1, E) for each in x]
        expected = [loss_values(each, CONFIG) for each in logits]
        ids = [layer.router(each)[1].flatten() for each in x]
        assert [layer(each).shape for each in x] == [shape] * 2
        assert torch.equal(layer.take_load(), torch.bincount(torch.cat(ids), minlength=E))
        total, decisions = layer.take_losses()
        assert decisions == 2
        torch.testing.assert_close(total, torch.tensor(expected, dtype=torch.float64).sum(0), rtol=1e-12, atol=0)
        assert layer.take_load().sum() == 0 and layer.take_losses() == (0.0, 0)
