"""Deferred weight gradients."""

from contextlib import nullcontext

import pytest
import torch

from moe_dualpipe.models.layers import Linear
from moe_dualpipe.overlap import WeightGrads


@pytest.mark.parametrize("shape", [(5,), (3, 7, 5)])
@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_linear_layer_that_never_defers_is_that_of_torch_with_the_same_bits(shape, frozen):
    layer, grads = Linear(5, 3, 1.0), []
    layer.weight_grads = WeightGrads()
    x, dy = torch.randn(shape), torch.randn(*shape[:-1], 3)
    for defers in (True, False):
        leaves = [x.clone().requires_grad_(frozen != 1), layer.weight.requires_grad_(frozen != 2)]
        with nullcontext() if defers else layer.weight_grads.never_defer():
            y = layer(leaves[0])
        assert (type(y.grad_fn).__name__ == "_LinearFunctionBackward") == defers
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        grads.append([y, *torch.autograd.grad(y, wanted, dy)])
    assert all(map(torch.equal, *grads))
