"""Deferred weight gradients."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from moe_dualpipe.models.layers import Linear
from moe_dualpipe.overlap import Comm, Compute, Engine, Segmented, WeightGrads, bind
from tests.support.segments import doubled


class Tied(Segmented):
    """One weight as embedding and as head."""

    def __init__(self):
        super().__init__()
        self.head = Linear(4, 6, 1.0)
        self.embedding = nn.Embedding(6, 4)
        self.embedding.weight = self.head.weight

    def segments(self, ids):
        x = yield Compute("embed", self.embedding, ids)
        moved = yield Comm("double", doubled, doubled, x)
        return (yield Compute("head", self.head, moved))


def test_both_gradients_of_a_tied_weight_are_added():
    """Also if one of them is deferred."""
    model, ids = Tied(), torch.tensor([[1, 2, 5]])
    expected = torch.nn.functional.linear(2 * model.embedding(ids), model.head.weight).square().sum()
    expected.backward()
    plain, model.head.weight.grad = model.head.weight.grad, None
    loss = model(ids).square().sum()
    Tied.overlapped_forward_backward(model, [ids], None, None, model, loss, None, None)
    torch.testing.assert_close(model.head.weight.grad, plain)
    assert len(model.weight_grads) == 0
    model.head.weight.grad = None
    grads = WeightGrads()
    bind(model, grads)
    loss = model(ids).square().sum()
    with grads.defer_to("later"):
        loss.backward()
    assert not torch.allclose(model.head.weight.grad, plain)  # a part is deferred
    grads.run_deferred("later")
    torch.testing.assert_close(model.head.weight.grad, plain)


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


def test_on_input_grads_is_called_before_the_last_weight_gradients():
    log = []

    class Hidden(Segmented):
        def __init__(self):
            super().__init__()
            self.first, self.second = Linear(4, 4, 1.0), Linear(4, 4, 1.0)

        def segments(self, x):
            y = yield Compute("first", self.first, x)
            moved = yield Comm("move", doubled, doubled, y)
            return (yield Compute("second", self.second, moved))

    module = Hidden()
    x = torch.randn(2, 4, requires_grad=True)
    loss = module(x).sum()

    def announced():
        assert x.grad is not None
        log.append("announced")

    engine = Engine(torch.device("cpu"), queued=True, log=log)
    Hidden.overlapped_forward_backward(
        module, [x.detach()], None, None, module, loss, None, None, on_input_grads=announced, engine=engine
    )
    assert log.index("announced") == log.index("first(B)") + 1
    assert log.index("announced") < log.index("first(W)")
