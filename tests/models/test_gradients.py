"""Gradients of router, losses, attention, layer and block against finite differences, in fp64."""

import pytest
import torch
from torch import Tensor, nn

from moe_dualpipe.models.router import Router
from tests.support.routers import KINDS, D, made, with_choices


def slope_and_difference(module: nn.Module, value, tensors: dict[str, Tensor]) -> None:
    """Check gradients of `value(False)` against slopes of `value(True)`, along a random direction of each tensor.

    The argument: whether to add the losses that a router attaches only to the gradients.
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


def weighted(router: Router, losses_L: Tensor) -> Tensor:
    """The sum of the router losses, times their factors."""
    return (losses_L * torch.tensor([*router.factors.values()])).sum()


@pytest.mark.parametrize("choices", KINDS, ids=str)
def test_gradients_of_router_and_losses_against_finite_differences(choices):
    torch.manual_seed(5)
    router = made(Router(with_choices(**choices)))
    x = torch.randn(2, 5, D, dtype=torch.float64, requires_grad=True)
    into = torch.randn(10, router.config.experts_per_token, dtype=torch.float64)

    def value(with_losses):
        weights, _, losses = router(x)
        return (weights * into).sum() + (weighted(router, losses) if with_losses else 0)

    slope_and_difference(router, value, {"x": x, "logits": router.logits.weight})
