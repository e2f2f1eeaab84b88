"""Stages, and pairs of chunks that run overlapped or in sequence."""

import dataclasses
from typing import Any

import torch

from moe_dualpipe.expert_parallel import Local
from moe_dualpipe.models import ModelConfig, StageOptions, StageSpec, TransformerStage, next_token_loss
from moe_dualpipe.overlap import Engine

CONFIG = ModelConfig(
    vocab_size=23, hidden_size=16, num_layers=4, num_dense_layers=1, num_heads=4, num_kv_heads=2, head_dim=4,
    dense_size=24, expert_size=12, num_experts=8, experts_per_token=2, num_shared_experts=1, init_std=0.3,
)  # fmt: skip


OVERLAPPED = TransformerStage.overlapped_forward_backward


def tokens(seed, sequences=2, length=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(CONFIG.vocab_size, (sequences, length), generator=generator)


def engine(queued=False, log=None):
    return Engine(torch.device("cpu"), queued, log)


def gradients(*modules):
    """The gradients of all parameters; None for a parameter without one."""
    return [p.grad for module in modules for p in module.parameters()]


def assert_same(ours, expected):
    assert len(ours) == len(expected)
    for one, other in zip(ours, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def stage(
    layers=4, dense=1, ep=None, embedding=True, head=True, recompute="none", seed=0, context=None, **choices
) -> Any:
    config = dataclasses.replace(CONFIG, num_layers=max(layers, 1), num_dense_layers=dense, **choices)
    spec = StageSpec(range(layers), embedding, head, 1.0)
    return TransformerStage(
        config,
        spec,
        ep if ep is not None else Local(config.num_experts),
        StageOptions(seed, recompute, context=context),
    )


def run_pair(first, second, x0, x1, overlapped, queued=False, log=None):
    """Run the forward of `first` on x0 and the backward of `second` on x1, overlapped or in sequence.

    A stage with a head has a loss; for a stage without one, gradients of its outputs are given. Returns outputs,
    losses, and gradients of weights and inputs.
    """
    for module in {first, second}:
        module.zero_grad()
    x0, x1 = (x.clone().requires_grad_(x.is_floating_point()) for x in (x0, x1))
    labels = tokens(99, *x0.shape[:2])

    def criterion(module):
        return next_token_loss if module.spec.head else None

    def loss_of(module, outputs, x):
        return next_token_loss(outputs, tokens(98, *x.shape[:2])) if module.spec.head else None

    outputs1 = second(x1)
    loss1 = loss_of(second, outputs1, x1)
    grads1 = torch.randn(outputs1.shape, generator=torch.Generator().manual_seed(5))
    if overlapped:
        end = (loss1, None, None) if loss1 is not None else (None, [outputs1], [grads1])
        outputs0, loss0 = OVERLAPPED(first, [x0], criterion(first), [labels], second, *end, engine=engine(queued, log))
    else:
        outputs0 = first(x0)
        loss0 = next_token_loss(outputs0, labels) if first.spec.head else None
        loss1.backward() if loss1 is not None else outputs1.backward(grads1)
    after_pair = gradients(first, second)
    # Then the backward of the first chunk, which tests what the overlapped forward recorded.
    loss0.backward() if loss0 is not None else outputs0.backward(torch.ones_like(outputs0))
    losses = [loss.detach() for loss in (loss0, loss1) if loss is not None]
    return [outputs0.detach(), *losses, *after_pair, *gradients(first, second), x0.grad, x1.grad]
