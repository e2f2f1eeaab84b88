"""Section "permute": rates of permute and unpermute, compared with a device-to-device copy.

Permute copies rows into expert-major order; unpermute sums them back. Both do almost no arithmetic, so the rate is the
bytes that must move per second, and the upper limit is the rate of a copy.

T tokens, D model dim, E experts, K experts per token, M = TK rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_dualpipe.kernels.order import ExpertOrder
from moe_dualpipe.kernels.permute import permute, unpermute
from moe_dualpipe.kernels.routing import expert_order

from .context import Context, Operation
from .correctness import TOLERANCE
from .measure import device_copy, excess, fill_free_memory_with_nan, relative_error, single_phase
from .shapes import MAIN_SHAPE, SHAPES, SMOKE_SHAPES, Shape


def run(context: Context) -> None:
    """Add the GB/s of permute and unpermute with Triton and in plain torch, and of the copy."""
    for shape in SMOKE_SHAPES if context.smoke else (MAIN_SHAPE, SHAPES[1]):
        measure_shape(context, shape)


def measure_shape(context: Context, shape: Shape) -> None:
    torch.manual_seed(0)
    x_TD = torch.randn(shape.T, shape.D, device=context.device, dtype=context.dtype)
    rows_MD = torch.randn(shape.rows, shape.D, device=context.device, dtype=context.dtype)
    weights_TK = torch.rand(shape.T, shape.K, device=context.device)
    ids_TK = torch.rand(shape.T, shape.E, device=context.device).topk(shape.K, dim=1).indices
    order = expert_order(ids_TK, shape.E, shape.rows)
    copy, copied_bytes = device_copy(context.device, context.smoke)
    operations = {"copy": Operation(single_phase(copy), {"": copied_bytes / 1e9}, "GB/s")}

    def add(name: str, call: Callable[[], Tensor], expected: Callable[[], Tensor], num_bytes: int) -> None:
        def fault() -> str:
            right = expected()
            fill_free_memory_with_nan(context.device, 8 * 2**30)
            return excess(relative_error(call(), right), TOLERANCE[context.dtype])

        operations[name] = Operation(single_phase(call), {"": num_bytes / 1e9}, "GB/s", fault)

    element = x_TD.element_size()
    for kernels in ("triton", "reference"):
        add(
            f"permute, {kernels}", lambda k=kernels: permute(x_TD, order, k), lambda: x_TD[order.gather_idx_M],
            shape.permute_bytes(element),
        )  # fmt: skip
        add(
            f"unpermute, {kernels}", lambda k=kernels: unpermute(rows_MD, order, weights_TK, k),
            lambda: reference_unpermute(rows_MD, order, weights_TK), shape.unpermute_bytes(element),
        )  # fmt: skip
    context.compare(str(shape), operations, reference="copy")


def reference_unpermute(rows_MD: Tensor, order: ExpertOrder, weights_TK: Tensor) -> Tensor:
    """Compute `unpermute` in fp32, one choice at a time."""
    y_TD = torch.zeros(len(weights_TK), rows_MD.shape[1], device=rows_MD.device)
    for positions_T, weights_T in zip(order.positions_NK.unbind(1), weights_TK.unbind(1), strict=True):
        y_TD += weights_T[:, None] * rows_MD[positions_T]
    return y_TD
