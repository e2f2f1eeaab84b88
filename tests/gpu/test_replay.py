"""Routing that takes given experts: in Triton as in plain torch, and its own choice if that is what is given."""

import pytest
import torch

from moe_dualpipe.kernels.routing import route
from tests.support.kernels import DEVICE

pytestmark = pytest.mark.usefixtures("guards")


@pytest.mark.parametrize("choice", [
    {}, {"score": "sigmoid", "scale": 1.5, "num_groups": 4, "top_groups": 2}, {"normalize": False, "num_groups": 3},
], ids=str)  # fmt: skip
def test_given_experts_replace_the_choice_of_their_tokens(choice):
    tokens, experts, k = 37, 12, 3
    logits, bias = 2 * torch.randn(tokens, experts), 0.3 * torch.randn(experts)
    given = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)])
    given[::3] = -1
    d_weights, found = torch.randn(tokens, k), []
    for kernels in ("reference", "triton"):
        leaf = logits.to(DEVICE).requires_grad_()
        weights, ids = route(leaf, k, bias_E=bias.to(DEVICE), kernels=kernels, replay_TK=given.to(DEVICE), **choice)
        weights.backward(d_weights.to(DEVICE))
        own, own_ids = route(leaf, k, bias_E=bias.to(DEVICE), kernels=kernels, **choice)
        again, _ = route(leaf, k, bias_E=bias.to(DEVICE), kernels=kernels, replay_TK=own_ids, **choice)
        assert torch.equal(again, own) and torch.equal(ids.cpu(), torch.where(given < 0, own_ids.cpu(), given))
        found.append((weights, leaf.grad))
    for ours, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_given_experts_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"^replay_TK must be \[5, 2\], ids for each token: got \[4, 2\]$"):
        route(torch.zeros(5, 4), 2, replay_TK=torch.zeros(4, 2, dtype=torch.int64))
