"""Recompute: what each level saves for backward."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from moe_dualpipe.expert_parallel import Loopback
from moe_dualpipe.models import next_token_loss
from moe_dualpipe.models.recompute import recompute_saved
from tests.support.pairs import stage, tokens


@pytest.mark.parametrize("recompute", ["none", "norms", "attention", "full"])
def test_normalized_copies_are_not_saved(recompute):
    model = stage(2, 1, Loopback(8, 4), recompute=recompute)
    made = []
    for block in model.layers.values():
        for norm in (block.attention_norm, block.mlp_norm):

            def watched(x, forward=norm.forward):
                y = forward(x)
                made.append(StorageWeakRef(y.untyped_storage()))
                return y

            norm.forward = watched
    loss = next_token_loss(model(tokens(1)), tokens(1))
    kept = [not t.expired() for t in made]
    # With "full" the shared experts run again as a whole, so only their input is saved.
    assert kept == {"none": [True] * 4, "full": [False] * 3 + [True]}.get(recompute, [False] * 4)
    loss.backward()


@pytest.mark.parametrize("part", [lambda y: y[:1], lambda y: y.T, lambda y: y.view(2, 8)])
def test_a_view_of_a_recomputed_tensor_is_saved_itself(part):
    y = torch.randn(4, 4)
    w = torch.randn_like(part(y)).requires_grad_()
    with recompute_saved(y, y.clone):
        out = part(y) * w
    out.sum().backward()
    assert torch.equal(w.grad, part(y))
