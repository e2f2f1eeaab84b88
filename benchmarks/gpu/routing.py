"""Section "routing": microseconds to choose experts and to sort the choices by expert, against plain torch.

These operators are many small launches, so launching them from Python can take longer than running them. Where
possible, each is also timed as a CUDA graph, which measures the device alone.

T tokens, E experts, K experts per token.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_dualpipe.kernels.order import ExpertOrder
from moe_dualpipe.kernels.routing import expert_order, route

from .context import Context, Operation
from .measure import error_summary, single_phase

SIZES = ((32768, 128, 8), (32768, 256, 8))  # T, E, K
SMOKE_SIZES = ((40, 8, 2),)


def run(context: Context) -> None:
    """Add the microseconds of both operators with Triton and in plain torch."""
    for T, E, K in SMOKE_SIZES if context.smoke else SIZES:
        measure_size(context, T, E, K)


@torch.no_grad()
def measure_size(context: Context, T: int, E: int, K: int) -> None:
    torch.manual_seed(0)
    logits_TE = torch.randn(T, E, device=context.device)
    ids_TK = logits_TE.topk(K, dim=1).indices
    operators: dict[str, Callable[[Any], tuple[Tensor, ...]]] = {
        "choose experts": lambda kernels: route(logits_TE, K, kernels=kernels),
        "sort by expert": lambda kernels: order_tensors(expert_order(ids_TK, E, T * K, kernels, check_ids=False)),
    }
    eager: dict[str, Operation] = {}
    calls: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
    for kernels in ("triton", "reference"):
        for name, operator in operators.items():
            calls[f"{name}, {kernels}"] = call = partial(operator, kernels)
            fault = partial(fault_of, call, partial(operator, "reference"))
            eager[f"{name}, {kernels}"] = Operation(single_phase(call), {"": 1}, "us", fault)
    what, graphs = f"T={T} E={E} K={K}", dict[str, Operation]()
    context.compare(what, eager)
    if context.device.type == "cuda":  # last: a capture that fails leaves torch on its stream
        for name, call in calls.items():
            if graph := captured(context, call):
                graphs[f"{name}, CUDA graph"] = Operation(single_phase(graph.replay), {"": 1}, "us")
        context.compare(what, graphs)


def fault_of(call: Callable[[], tuple[Tensor, ...]], expected: Callable[[], tuple[Tensor, ...]]) -> str:
    """What differs between two results: ids and order must be equal, weights close. "" if nothing differs."""
    try:
        torch.testing.assert_close(tuple(call()), tuple(expected()), rtol=1e-5, atol=1e-6)
    except AssertionError as error:
        return error_summary(error)
    return ""


def order_tensors(order: ExpertOrder) -> tuple[Tensor, ...]:
    return order.gather_idx_M, order.choice_idx_M, order.positions_NK, order.expert_offsets


def captured(context: Context, call: Callable[[], Any]) -> torch.cuda.CUDAGraph | None:
    """Return a CUDA graph of `call`; None if `call` fails or cannot be captured because it waits for the device."""
    graph = torch.cuda.CUDAGraph()
    try:
        call()  # compiles
        with torch.cuda.graph(graph):
            call()
    except Exception as error:
        context.log(f"no graph: {error_summary(error)}")
        return None
    finally:
        torch.cuda.synchronize()
    return graph
