"""A second derivative is right, or an error. It is never silently zero."""

import pytest
import torch

from moe_dualpipe.expert_parallel import Local, combine, dispatch
from moe_dualpipe.kernels.cross_entropy import linear_cross_entropy
from moe_dualpipe.kernels.experts import experts
from moe_dualpipe.kernels.grouped_gemm import grouped_linear
from moe_dualpipe.kernels.linear import linear
from moe_dualpipe.kernels.permute import permute, unpermute
from moe_dualpipe.kernels.routing import expert_order, route
from moe_dualpipe.kernels.weight_grads import WeightGrads
from moe_dualpipe.models import attach
from moe_dualpipe.overlap import Compute
from tests.support.kernels import DEVICE
from tests.support.segments import module_of

IDS = torch.tensor([[0, 1], [1, -1], [2, 0]], device=DEVICE)
ORDER = expert_order(IDS, 3, 5, "reference")
LABELS = torch.tensor([1, -100, 0], device=DEVICE)
EP = Local(3, "reference")
EXCHANGE = EP.prepare(IDS)


def segment(_module, x):
    return (yield Compute("mlp", torch.exp, x))


# The function, and the shapes of its inputs; by the autograd function that it calls, and whether it runs in Triton.
FUNCTIONS = {
    "_LinearFunction": (lambda x, w: linear(x, w, WeightGrads()), [(5, 8), (4, 8)]),
    "_GroupedLinearFunction": (
        lambda x, w: grouped_linear(x, w, ORDER.expert_offsets, kernels="reference"), [(5, 8), (3, 4, 8)],
    ),
    "_PermuteFunction": (lambda x: permute(x, ORDER, "reference"), [(3, 4)]),
    "_UnpermuteFunction": (lambda x, w: unpermute(x, ORDER, w, "reference"), [(5, 4), (3, 2)]),
    "_LinearCrossEntropyFunction": (lambda x, w: linear_cross_entropy(x, w, LABELS), [(3, 8), (4, 8)]),
    "_Attach": (lambda x, w: attach(x.exp(), w.square().sum()), [(), (3,)]),
    "_ChunkNode": (lambda x: module_of(segment)(x), [(3, 4)]),
    "_DispatchFunction": (lambda x, w: sum(t.sum() for t in dispatch(x, w, EXCHANGE, EP)), [(3, 4), (3, 2)]),
    "_CombineFunction": (lambda x: combine(x, EXCHANGE, EP), [(3, 4)]),
    "_GroupedLinearFunction triton": (
        lambda x, w: grouped_linear(x, w, ORDER.expert_offsets, kernels="triton"), [(5, 8), (3, 4, 8)],
    ),
    "_PermuteFunction triton": (lambda x: permute(x, ORDER, "triton"), [(3, 4)]),
    "_UnpermuteFunction triton": (lambda x, w: unpermute(x, ORDER, w, "triton"), [(5, 4), (3, 2)]),
    "_ExpertsFunction triton": (
        lambda x, up, down, w: experts(x, up, down, ORDER, w, kernels="triton"), [(3, 8), (3, 8, 8), (3, 8, 4), (3, 2)],
    ),
    "_RouteFunction triton": (lambda x: route(x, 2, kernels="triton")[0], [(3, 4)]),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_second_derivative_is_right_or_an_error(name):
    """The output gradient is a constant, as that of `loss.backward()`: torch's `once_differentiable` lets it pass."""
    function, shapes = FUNCTIONS[name]
    triton = name.endswith("triton")
    dtype = torch.float32 if triton else torch.float64
    inputs = [torch.randn(shape, dtype=dtype, device=DEVICE, requires_grad=True) for shape in shapes]
    try:
        torch.autograd.grad(function(*inputs).sum(), inputs, create_graph=True)
    except RuntimeError as error:
        assert "cannot be differentiated twice (create_graph): " in str(error)
        assert ('use kernels="reference"' in str(error)) == triton
    else:
        assert not triton
        assert torch.autograd.gradgradcheck(function, inputs)
