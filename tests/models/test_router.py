"""The router against loops, its losses against a plain model that adds them up, and the bias that evens the load."""

import dataclasses
import math

import pytest
import torch
from ranks import run_ranks
from test_models import moe_oracle
from torch import Tensor, nn

from moe_dualpipe.expert_parallel import AllToAll, Local
from moe_dualpipe.models import ModelConfig, MoE, build_model, next_token_loss
from moe_dualpipe.models.attention import Attention
from moe_dualpipe.models.balance import sequence_loss, shares, z_loss
from moe_dualpipe.models.block import Block
from moe_dualpipe.models.recompute import RECOMPUTE
from moe_dualpipe.models.router import BalancedRouter, Router, balanced_ids

CONFIG = ModelConfig(
    vocab_size=19, hidden_size=8, num_layers=3, num_dense_layers=1, num_heads=2, num_kv_heads=1, head_dim=4,
    dense_size=12, expert_size=6, num_experts=8, experts_per_token=3, init_std=0.4, sequence_loss=0.7, z_loss=0.03,
)  # fmt: skip
D, E, K = 8, 8, 3
KINDS = [
    {},
    {"router_score": "sigmoid", "normalize_weights": False},
    {"router_bias": True, "routed_scale": 2.5},
    {"router_score": "sigmoid", "expert_groups": 4, "top_groups": 2, "router_bias": True},
    {"expert_groups": 4, "top_groups": 3, "normalize_weights": False},
    {"expert_groups": 8, "top_groups": 5, "router_bias": True, "experts_per_token": 1},
]


def with_choices(**choices) -> ModelConfig:
    return dataclasses.replace(CONFIG, **choices)


def made(router: Router) -> Router:
    """`router` in fp64, with a bias, if it is to have one, as large as the scores."""
    if router.bias_E is not None:
        router.bias_E.uniform_(-0.3, 0.3, generator=torch.Generator().manual_seed(8))
    return router.double()


# ---- The decision ----


def scores_of(logits: list[float], config: ModelConfig) -> list[float]:
    if config.router_score == "sigmoid":
        return [1 / (1 + math.exp(-v)) for v in logits]
    return [math.exp(v) / sum(math.exp(w) for w in logits) for v in logits]


def decision_of(logits: list[float], bias: list[float], config: ModelConfig) -> tuple[list[int], list[float]]:
    """Ids, best first, and weights of one token."""
    scores = scores_of(logits, config)
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    size = config.num_experts // config.expert_groups
    groups = [range(g * size, (g + 1) * size) for g in range(config.expert_groups)]
    groups.sort(key=lambda group: -sum(sorted((choice[e] for e in group), reverse=True)[:2]))
    eligible = [e for group in groups[: config.top_groups] for e in group]
    ids = sorted(eligible, key=lambda e: -choice[e])[: config.experts_per_token]
    total = sum(scores[e] for e in ids) if config.normalize_weights else 1.0
    return ids, [config.routed_scale * scores[e] / total for e in ids]


@pytest.mark.parametrize("choices", KINDS, ids=str)
def test_the_router_equals_a_loop(choices):
    config = with_choices(**choices)
    router = made(Router(config))
    x = torch.randn(3, 9, D, dtype=torch.float64)
    weights, ids, _ = router(x)
    bias = [0.0] * E if router.bias_E is None else router.bias_E.tolist()
    for t, token in enumerate(x.flatten(0, 1)):
        logits = [sum(a * b for a, b in zip(token.tolist(), row, strict=True)) for row in router.logits.weight.tolist()]
        expected_ids, expected = decision_of(logits, bias, config)
        assert ids[t].tolist() == expected_ids
        assert weights[t].tolist() == pytest.approx(expected, rel=1e-12)


def test_choices_are_counted_until_the_count_is_taken():
    router = Router(CONFIG)
    _, ids, losses = router(torch.randn(11, D))
    router.count(ids, losses)
    router.count(ids, 2 * losses)
    assert router.take_load().tolist() == (2 * torch.bincount(ids.flatten(), minlength=E)).tolist()
    total, decisions = router.take_losses()
    assert decisions == 2
    torch.testing.assert_close(total, 3 * losses)
    assert router.take_load().sum() == 0
    assert router.take_losses() == (0.0, 0)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_scores_of_zero_give_finite_weights_losses_and_gradients(score):
    router = Router(with_choices(router_score=score))
    with torch.no_grad():
        router.logits.weight.fill_(-1e4)
    weights, _, losses = router(torch.ones(3, D))
    weights.sum().backward()
    assert all(torch.isfinite(t).all() for t in (weights, losses, router.logits.weight.grad))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_bias_moves_the_choice_and_never_the_weights(score):
    router = Router(with_choices(router_score=score, router_bias=True, normalize_weights=False, z_loss=0.0)).double()
    x = torch.randn(50, D, dtype=torch.float64)
    scores = router.logits(x).softmax(-1) if score == "softmax" else router.logits(x).sigmoid()
    _, before, _ = router(x)
    router.bias_E[[2, 5]] = 2.0  # above any score
    router.bias_E[7] = -2.0
    weights, ids, _ = router(x)
    assert {*ids.flatten().tolist()} >= {2, 5} and 7 in before and 7 not in ids
    assert all({2, 5} < {*row} for row in ids.tolist())
    assert not torch.equal(ids, before)
    torch.testing.assert_close(weights, scores.gather(1, ids), rtol=1e-14, atol=0)


@pytest.mark.parametrize("bias", [False, True])
def test_a_token_never_leaves_its_groups(bias):
    config = with_choices(num_experts=12, experts_per_token=4, expert_groups=4, top_groups=2, router_bias=bias)
    router = made(Router(config))
    groups = router(torch.randn(300, D, dtype=torch.float64))[1] // 3
    used = [len({*row}) for row in groups.tolist()]
    assert {*used} == {2}
    assert {*groups.flatten().tolist()} == {0, 1, 2, 3}


# ---- The bias ----


def test_a_bias_stays_in_fp32_and_is_saved():
    router = Router(with_choices(router_bias=True))
    router.bias_E[0] = 0.5 + 2**-12  # no number of bf16
    for move in (nn.Module.bfloat16, nn.Module.double, nn.Module.half, lambda m: m.to("cpu", torch.bfloat16)):
        move(router)
        assert router.bias_E.dtype == torch.float32
        assert router.bias_E[0] == 0.5 + 2**-12
    assert router.logits.weight.dtype == torch.bfloat16
    assert {*router.state_dict()} == {"logits.weight", "bias_E"}
    assert {*Router(CONFIG).state_dict()} == {"logits.weight"}
    with torch.device("meta"):
        empty = Router(with_choices(router_bias=True)).bfloat16().to_empty(device="cpu")
    assert (empty.bias_E.dtype, empty.bias_E.device.type) == (torch.float32, "cpu")


def test_a_bias_moves_by_its_rate_against_the_load():
    router = Router(with_choices(num_experts=3, router_bias=True))
    router.move_bias(torch.tensor([3, 1, 2]), 0.1)
    torch.testing.assert_close(router.bias_E, torch.tensor([-0.1, 0.1, 0.0]))
    router.move_bias(torch.tensor([0, 1, 1]), 0.25)  # the mean is no integer
    torch.testing.assert_close(router.bias_E, torch.tensor([0.15, -0.15, -0.25]))


@pytest.mark.parametrize("choices", [{}, {"router_score": "sigmoid", "expert_groups": 4, "top_groups": 2}], ids=str)
@pytest.mark.parametrize("rate,lowest,highest", [(0.0, 2.0, 8.0), (0.003, 1.0, 1.15)])
def test_the_bias_evens_a_skewed_load(choices, rate, lowest, highest):
    torch.manual_seed(3)
    router = Router(with_choices(router_bias=True, **choices))
    skew = torch.randn(D)  # what all tokens have in common
    loads = []
    with torch.no_grad():
        for _ in range(250):
            router.count(router(torch.randn(256, D) + 2 * skew)[1])
            loads.append(load := router.take_load())
            router.move_bias(load, rate)
    late = torch.stack(loads[-20:]).sum(0)
    assert lowest < late.max() / late.float().mean() < highest


# ---- The losses ----


def total_of(tensors: list[Tensor]) -> Tensor:
    return sum(tensors[1:], tensors[0])


def loss_values(logits_BSE: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """The sequence-wise loss and the z-loss, without their factors: sequence by sequence, token by token."""
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


def test_docstring_examples_of_the_losses():
    values = sequence_loss(torch.tensor([[[0.8, 0.2], [0.6, 0.4]]]), torch.tensor([[[0], [0]]]))
    assert values.item() == pytest.approx(1.4)
    assert z_loss(torch.zeros(1, 3, 2)).item() == pytest.approx(math.log(2) ** 2)


@pytest.mark.parametrize("choices", [*KINDS[:4], {"sequence_loss": 0.0}, {"z_loss": 0.0}], ids=str)
def test_the_losses_equal_loops_and_change_no_value(choices):
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


def slope_and_difference(module: nn.Module, value, tensors: dict[str, Tensor]) -> None:
    """Gradients of `value(False)` are the slopes of `value(True)`, along a random direction of each tensor.

    The argument says whether to add the losses that a router attaches, and only tells.
    """
    module.zero_grad()
    value(False).backward()
    for name, tensor in tensors.items():
        direction = torch.randn_like(tensor)
        slope, values, step = (tensor.grad * direction).sum().item(), [], 1e-6
        for sign in (1, -1):
            with torch.no_grad():
                tensor += sign * step * direction
            values.append(value(True).item())
            with torch.no_grad():
                tensor -= sign * step * direction
        assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=2e-6, abs=1e-8), name


def told(routers: list[Router]) -> Tensor:
    """The sum of the losses since the last call, times their factors."""
    total = torch.zeros((), dtype=torch.float64)
    for router in routers:
        losses, decisions = router.take_losses()
        assert decisions == 1
        total += (losses * torch.tensor([*router.factors.values()])).sum()
    return total


@pytest.mark.parametrize("choices", KINDS, ids=str)
def test_gradients_of_router_and_losses_against_finite_differences(choices):
    torch.manual_seed(5)
    router = made(Router(with_choices(**choices)))
    x = torch.randn(2, 5, D, dtype=torch.float64, requires_grad=True)
    into = torch.randn(10, router.config.experts_per_token, dtype=torch.float64)

    def value(with_losses):
        weights, ids, losses = router(x)
        router.count(ids, losses)
        attached = told([router])
        return (weights * into).sum() + (attached if with_losses else 0)

    slope_and_difference(router, value, {"x": x, "logits": router.logits.weight})


@pytest.mark.parametrize("choices", KINDS[:2], ids=str)
def test_gradients_of_the_losses_alone(choices):
    config = with_choices(**choices)
    logits = torch.randn(2, 3, E, dtype=torch.float64, requires_grad=True)
    ids = logits.detach().topk(K).indices
    assert torch.autograd.gradcheck(lambda x: sequence_loss(shares(x, config), ids), (logits,))
    assert torch.autograd.gradcheck(z_loss, (logits,))


@pytest.mark.parametrize("heads,kv_heads,qk_norm", [(2, 2, "none"), (4, 2, "head"), (2, 1, "full")])
def test_gradients_of_grouped_query_attention(heads, kv_heads, qk_norm):
    sizes = {"hidden_size": 4, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 2}
    layer = Attention(with_choices(**sizes, qk_norm=qk_norm), 0.3).double()
    names = [name for name, _ in layer.named_parameters()]

    def function(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (x, *layer.parameters()))


@pytest.mark.parametrize("attention", ["gqa", "mla", None])  # None: the MoE layer alone
def test_gradients_of_a_layer_and_of_a_block_against_finite_differences(attention):
    torch.manual_seed(6)
    config = with_choices(attention=attention or "gqa", router_bias=True, kv_rank=5, rope_dim=2, value_dim=3, q_rank=7)
    if attention:
        module, router = (block := Block(config, 1, Local(E), 0)), block.mlp.router
    else:
        module, router = (layer := MoE(config, Local(E), 0, "layers.1")), layer.router
    made(router)
    module.double()
    x, into = (torch.randn(2, 5, D, dtype=torch.float64) for _ in range(2))
    x.requires_grad_()

    def value(with_losses):
        y = module(x)
        attached = told([router])
        return (y * into).sum() + (attached if with_losses else 0)

    slope_and_difference(module, value, {"x": x, **dict(module.named_parameters())})


def test_what_a_sequence_is_to_a_layer_of_its_own():
    """The last dimension but one; all tokens, where there are no others."""
    layer = MoE(CONFIG, Local(E), 0, "layers.1").double()
    x = torch.randn(2, 3, 5, D, dtype=torch.float64)
    for shape, sequences in [((2, 3, 5, D), 6), ((6, 5, D), 6), ((2, 15, D), 2), ((30, D), 1)]:
        assert layer(x.view(shape)).shape == shape
        losses, _ = layer.router.take_losses()
        expected = loss_values(layer.router.logits(x).reshape(sequences, -1, E), CONFIG)
        torch.testing.assert_close(losses, torch.stack(expected).detach(), rtol=1e-12, atol=0)


# ---- In a model ----


def batch(seed: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(CONFIG.vocab_size, (2, 2, 5), generator=torch.Generator().manual_seed(seed))
    return tokens[0], tokens[1]


def plain_loss(model, x_BS: Tensor, labels_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy plus all losses of all routers, in ordinary autograd; and the losses by layer, without factors."""
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
    """Gradients and losses by layer of the same model with nothing attached, over some batches."""
    model, values = oracle_model(dataclasses.replace(config, sequence_loss=0.0, z_loss=0.0)), []
    model.config = config
    for seed in seeds:
        total, each = plain_loss(model, *batch(seed))
        total.backward()
        values.append(each)
    return {name: p.grad for name, p in model.named_parameters()}, total_of(values)


def oracle_model(config: ModelConfig, *args, **kwargs):
    model = build_model(config, *args, seed=2, **kwargs).double()
    for module in model.modules():
        if isinstance(module, Router):
            made(module)
    return model


def routers_of(model) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


def check(model, expected: dict[str, Tensor | None], values_LL: Tensor, chunks: int) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-12, msg=name)
    for router, values in zip(routers_of(model), values_LL, strict=True):
        total, decisions = router.take_losses()
        assert decisions == chunks
        torch.testing.assert_close(total, values, rtol=1e-12, atol=0)
        assert router.take_load().sum() == chunks * 10 * K


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("choices", [KINDS[0], KINDS[3]], ids=str)
def test_gradients_are_those_of_a_plain_model_that_adds_the_losses(choices, recompute):
    """One chunk alone, then the forward of one beside the backward of another."""
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
    losses = torch.stack([torch.as_tensor(router.take_losses()[0]) for router in routers_of(model)])
    return {name: p.grad.numpy() for name, p in model.named_parameters()}, losses.numpy()


def test_expert_parallel_ranks_add_up_to_the_plain_model():
    (expected, values), ranks = oracle_of(CONFIG, (0, 1)), run_ranks(2, spread_gradients)
    for name, grad in expected.items():
        parts = [torch.from_numpy(grads[name]) for grads, _ in ranks]
        ours = torch.cat(parts) if ".experts." in name else sum(parts)
        torch.testing.assert_close(ours, grad, rtol=1e-9, atol=1e-12, msg=name)
    of_layers = torch.from_numpy(sum(losses for _, losses in ranks))
    torch.testing.assert_close(of_layers, values, rtol=1e-12, atol=0)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_losses_change_no_value_of_a_model_and_nothing_without_gradients(recompute):
    (x, _), outputs = batch(3), []
    for factors in ({}, {"sequence_loss": 0.0, "z_loss": 0.0}):
        model = build_model(with_choices(**factors), recompute=recompute)
        outputs.append(model(x).detach())
        [router.take_losses() for router in routers_of(model)]
        with torch.no_grad():
            outputs.append(model(x))
        assert all(router.take_losses() == (0.0, 0) for router in routers_of(model))
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_losses_of_a_bf16_router_are_computed_in_fp32():
    """Of logits near 50 bf16 keeps steps of 0.25, and a gradient of the mean over tokens is a small number."""
    router = Router(with_choices(sequence_loss=0.5, z_loss=0.01)).bfloat16()
    x = torch.randn(4, 33, D).bfloat16()
    weights, _, losses = router(x)
    (0 * weights).sum().backward()
    logits = router.logits(x).detach().double().requires_grad_()
    values = torch.stack(loss_values(logits, CONFIG))
    (values * torch.tensor([0.5, 0.01])).sum().backward()
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, values.float(), rtol=1e-5, atol=0)
    # What reaches the weight was rounded to bf16 once for each logit.
    expected = torch.einsum("bse,bsd->ed", logits.grad, x.double())
    assert (router.logits.weight.grad - expected).norm() < 2**-8 * expected.norm()


def test_a_balanced_router_stays_balanced_under_any_bias_and_takes_the_losses():
    router = made(BalancedRouter(with_choices(router_bias=True)))
    x = torch.randn(2, 8, D, dtype=torch.float64)
    weights, ids, losses = router(x)
    expected = balanced_ids(router.config, 16, x.device)
    assert torch.equal(ids.sort(1).values, expected.sort(1).values)
    torch.testing.assert_close(losses, torch.stack(loss_values(router.logits(x), router.config)).detach())
    torch.testing.assert_close(weights, router.logits(x).flatten(0, 1).gather(1, ids).softmax(-1))
    (0 * weights).sum().backward()
    assert router.logits.weight.grad.norm() > 0


@pytest.mark.parametrize("name", ["sequence_loss", "z_loss"])
def test_factors_are_checked(name):
    for wrong in (-0.1, math.nan):
        with pytest.raises(ValueError, match=f"{name} cannot be negative: got {wrong}; 0 is for none"):
            with_choices(**{name: wrong})
