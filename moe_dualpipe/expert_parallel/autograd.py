"""Dispatch and combine as differentiable operators, for layers in plain autograd. Each is the backward of the other.

They block until the transfer ends. To overlap communication, write the layer as segments (overlap/segment.py).
"""

from typing import Any

import torch
from torch import Tensor

from ..kernels.backend import forbid_double_backward
from .protocol import ExpertParallel, Route


class _DispatchFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, route: Route, ep: ExpertParallel) -> tuple[Tensor, Tensor]:
        ctx.route, ctx.ep = route, ep
        x_ND, weights_NK = ep.dispatch(x_TD, route, weights_TK).wait()
        assert weights_NK is not None
        return x_ND.view_as(x_ND), weights_NK.view_as(weights_NK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        forbid_double_backward("dispatch", "the transfer back records no graph")
        grad_x_ND, grad_weights_NK = grads
        combined = ctx.ep.combine(grad_x_ND, ctx.route, grad_weights_NK).wait()
        return combined.y_TD, combined.weight_grads_TK, None, None


class _CombineFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_ND: Tensor, route: Route, ep: ExpertParallel) -> Tensor:
        ctx.route, ctx.ep = route, ep
        y_TD = ep.combine(y_ND, route).wait().y_TD
        return y_TD.view_as(y_TD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        forbid_double_backward("combine", "the transfer back records no graph")
        return ctx.ep.dispatch(grads[0], ctx.route).wait().x_ND, None, None


def dispatch(x_TD: Tensor, weights_TK: Tensor, route: Route, ep: ExpertParallel) -> tuple[Tensor, Tensor]:
    """Send tokens and routing weights to the ranks of their experts. Returns the received x_ND and weights_NK."""
    return _DispatchFunction.apply(x_TD, weights_TK, route, ep)  # type: ignore[return-value]


def combine(y_ND: Tensor, route: Route, ep: ExpertParallel) -> Tensor:
    """Send back one row per received row, and sum the rows of each token over ranks. Returns y_TD."""
    return _CombineFunction.apply(y_ND, route, ep)  # type: ignore[return-value]
