"""Section "permute": rates of permute and unpermute, compared with a device-to-device copy.

Permute copies rows into expert-major order; unpermute sums them back. Both do almost no arithmetic, so the rate is the
bytes that must move per second, and the upper limit is the rate of a copy, which is timed interleaved with them.

T tokens, D model dim, E experts, K experts per token, M = TK rows.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_dualpipe.kernels.order import ExpertOrder
from moe_dualpipe.kernels.permute import permute, unpermute
from moe_dualpipe.kernels.routing import expert_order

from .context import Context
from .correctness import TOLERANCE
from .measure import (
    device_copy,
    error_summary,
    fill_free_memory_with_nan,
    rate_statistics,
    relative_error,
    single_phase,
    time_interleaved,
)
from .shapes import GOAL_SHAPE, SHAPES, SMOKE_SHAPES, Shape

KERNELS = ("triton", "reference")


def run(context: Context, record: dict[str, Any]) -> None:
    """Fill record["shapes"]: GB/s of "permute" and "unpermute" for each kernel backend, and of the copy."""
    record["shapes"] = []
    for shape in SMOKE_SHAPES if context.smoke else (GOAL_SHAPE, SHAPES[1]):
        entry: dict[str, Any] = {"shape": {name: getattr(shape, name) for name in "TDFEK"}}
        record["shapes"].append(entry)
        measure_shape(context, shape, entry)
        context.save()


def measure_shape(context: Context, shape: Shape, entry: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x_TD = torch.randn(shape.T, shape.D, device=context.device, dtype=context.dtype)
    rows_MD = torch.randn(shape.rows, shape.D, device=context.device, dtype=context.dtype)
    weights_TK = torch.rand(shape.T, shape.K, device=context.device)
    ids_TK = torch.rand(shape.T, shape.E, device=context.device).topk(shape.K, dim=1).indices
    order = expert_order(ids_TK, shape.E, shape.rows)
    runs: dict[tuple[str, str], Callable[[], Tensor]] = {}
    for kernels in KERNELS:
        runs["permute", kernels] = lambda k=kernels: permute(x_TD, order, k)
        runs["unpermute", kernels] = lambda k=kernels: unpermute(rows_MD, order, weights_TK, k)
    element = x_TD.element_size()
    num_bytes = {"permute": shape.permute_bytes(element), "unpermute": shape.unpermute_bytes(element)}
    references = {
        "permute": lambda: x_TD[order.gather_idx_M],
        "unpermute": lambda: reference_unpermute(rows_MD, order, weights_TK),
    }
    copy, copy_bytes = device_copy(context.device, context.smoke)
    correct = {}
    for (name, kernels), call in runs.items():
        outcome = entry.setdefault(name, {}).setdefault(kernels, {})
        if check_operator(context, call, references[name], outcome):
            correct[f"{name}/{kernels}"] = single_phase(call)
    times = time_interleaved(context.clock, {"copy": single_phase(copy)} | correct, *context.rounds_and_repeats)
    entry["copy"] = rate_statistics(times.seconds["copy"][0], copy_bytes / 1e9, "GB/s")
    for name, kernels in runs:
        outcome, case = entry[name][kernels], f"{name}/{kernels}"
        if case in times.failures:
            outcome.update(status="failed", reason=times.failures[case])
        elif case in times.seconds:
            outcome |= rate_statistics(times.seconds[case][0], num_bytes[name] / 1e9, "GB/s")
            outcome.update(status="timed", share=outcome["median"] / entry["copy"]["median"])
        context.log(f"  {name}, {kernels}, {shape}: {outcome['status']} {outcome.get('reason', '')}")


def check_operator(
    context: Context, call: Callable[[], Tensor], reference: Callable[[], Tensor], outcome: dict[str, Any]
) -> bool:  # fmt: skip
    """Return whether the operator agrees with `reference`; otherwise write the reason to `outcome`."""
    try:
        expected = reference()
        fill_free_memory_with_nan(context.device, 8 * 2**30)
        outcome["error"] = relative_error(call(), expected)
    except Exception as error:  # an operator that fails must not end the run
        outcome.update(status="failed", reason=error_summary(error))
        return False
    if outcome["error"] <= TOLERANCE[context.dtype]:
        return True
    outcome.update(status="wrong", reason=f"relative error {outcome['error']:.2g}")
    return False


def reference_unpermute(rows_MD: Tensor, order: ExpertOrder, weights_TK: Tensor) -> Tensor:
    """Compute `unpermute` in fp32, one choice at a time."""
    y_TD = torch.zeros(len(weights_TK), rows_MD.shape[1], device=rows_MD.device)
    for positions_T, weights_T in zip(order.positions_NK.unbind(1), weights_TK.unbind(1), strict=True):
        y_TD += weights_T[:, None] * rows_MD[positions_T]
    return y_TD
