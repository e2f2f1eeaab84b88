"""Section "routing": microseconds to choose experts and to sort the choices by expert, against plain torch.

These operators are many small launches, so launching them from Python can take longer than running them. Where
possible, each is also timed as a CUDA graph, which measures the device alone.

T tokens, E experts, K experts per token.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_dualpipe.kernels.routing import expert_order, route

from .context import Context
from .measure import error_summary, microsecond_statistics, single_phase, time_interleaved

KERNELS = ("triton", "reference")
SIZES = ((32768, 128, 8), (32768, 256, 8))  # T, E, K
SMOKE_SIZES = ((40, 8, 2),)


def run(context: Context, record: dict[str, Any]) -> None:
    """Fill record["sizes"]: microseconds of "route" and "order" for each kernel backend."""
    record["sizes"] = []
    for size in SMOKE_SIZES if context.smoke else SIZES:
        entry: dict[str, Any] = dict(zip("TEK", size, strict=True))
        record["sizes"].append(entry)
        measure_size(context, *size, entry)
        context.save()


def measure_size(context: Context, T: int, E: int, K: int, entry: dict[str, Any]) -> None:
    torch.manual_seed(0)
    logits_TE = torch.randn(T, E, device=context.device)
    ids_TK = logits_TE.topk(K, dim=1).indices
    operators = {
        "route": lambda kernels: route(logits_TE, K, kernels=kernels),
        "order": lambda kernels: order_tensors(expert_order(ids_TK, E, T * K, kernels, check_ids=False)),
    }
    correct: dict[str, Callable[[], Any]] = {}
    with torch.no_grad():
        for name, operator in operators.items():
            expected = operator("reference")
            for kernels in KERNELS:
                outcome = entry.setdefault(name, {}).setdefault(kernels, {})
                call = lambda operator=operator, kernels=kernels: operator(kernels)  # noqa: E731
                if check_operator(call, expected, outcome):
                    correct[f"{name}/{kernels}"] = call
        cases = {case: single_phase(call) for case, call in correct.items()}
        times = time_interleaved(context.clock, cases, *context.rounds_and_repeats)
        for case, call in correct.items():
            name, kernels = case.split("/")
            outcome = entry[name][kernels]
            if case in times.failures:
                outcome.update(status="failed", reason=times.failures[case])
            else:
                outcome.update(status="timed", called=microsecond_statistics(times.seconds[case][0]))
                outcome["graph"] = time_cuda_graph(context, call)
            context.log(f"  {name}, {kernels}, T={T} E={E} K={K}: {outcome['status']} {outcome.get('reason', '')}")


def order_tensors(order: Any) -> tuple[Tensor, ...]:
    return order.gather_idx_M, order.choice_idx_M, order.positions_NK, order.expert_offsets


def check_operator(call: Callable[[], Any], expected: Any, outcome: dict[str, Any]) -> bool:
    """Return whether ids and order are equal and weights close; otherwise write the reason to `outcome`."""
    try:
        for found, value in zip(call(), expected, strict=True):
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)
    except AssertionError as error:
        outcome.update(status="wrong", reason=error_summary(error))
        return False
    except Exception as error:  # an operator that fails must not end the run
        outcome.update(status="failed", reason=error_summary(error))
        return False
    return True


def time_cuda_graph(context: Context, call: Callable[[], Any]) -> dict[str, Any] | None:
    """Time a CUDA graph of `call`. Return None on a CPU, or if `call` cannot be captured because it syncs."""
    if context.device.type != "cuda":
        return None
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except Exception as error:  # for example, a host sync cannot be captured
        context.log(f"    no graph: {error_summary(error)}")
        return None
    finally:
        torch.cuda.synchronize()
    times = time_interleaved(context.clock, {"graph": single_phase(graph.replay)}, *context.rounds_and_repeats)
    return microsecond_statistics(times.seconds["graph"][0])
