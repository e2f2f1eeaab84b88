"""The expert MLP against other implementations: forward, backward, and what is kept between them.

Each contestant must agree with fp64 before it is timed. Forward and backward are timed in one go, as training runs
them, with a dense matrix product taking its turn among the contestants; shares are of that product.
"""

import gc
import math
from typing import Any

import torch
from torch import Tensor

from . import precompile
from .context import Context
from .correctness import ReferenceValues, compute_reference, relative_errors, tolerance_violations
from .implementations import AUTOTUNED, Implementation, Problem, find_implementation, is_installed
from .measure import (
    Case,
    EndPhase,
    dense_matmul,
    error_summary,
    fill_free_memory_with_nan,
    rate_statistics,
    single_phase,
    time_interleaved,
)
from .shapes import SHAPES, SMOKE_SHAPES, Shape

MIN_SECONDS_PER_SHAPE = 20.0  # what a shape takes at least, once its kernels are compiled
DENSE = "dense"


def run(context: Context, record: dict[str, Any]) -> None:
    """Fill record["shapes"], one entry a shape."""
    shapes = SMOKE_SHAPES if context.smoke else SHAPES
    record["shapes"] = []
    if not context.smoke:
        precompile.precompile(context, shapes)
    for index, shape in enumerate(shapes):
        if context.seconds_left() < MIN_SECONDS_PER_SHAPE and not context.smoke:
            context.log(f"  {shape}: skipped, {context.seconds_left():.0f} s are left; use a larger --minutes")
            record.setdefault("skipped", []).append(str(shape))
            continue
        entry: dict[str, Any] = {"shape": shape_record(shape, context.dtype.itemsize), "contestants": {}}
        record["shapes"].append(entry)
        measure_shape(context, shape, entry, may_autotune=index < context.tuning_shapes)
        free_memory(context)
        context.save()


def shape_record(shape: Shape, element: int) -> dict[str, Any]:
    sizes = {name: getattr(shape, name) for name in "TDFEK"}
    formula = {"kept_bytes_formula": shape.saved_bytes(element), "forward_flops": shape.forward_flops}
    return {**sizes, "note": shape.note, **formula, "backward_flops": shape.backward_flops}


def measure_shape(context: Context, shape: Shape, entry: dict[str, Any], may_autotune: bool) -> None:
    """Check every contestant at this shape, then time those that agree."""
    context.log(f"  {shape} {shape.note}")
    problem = Problem.random(shape, context.dtype, context.device)
    expected = compute_reference(problem)
    agreeing: dict[str, Implementation] = {}
    for name in context.implementations:
        outcome: dict[str, Any] = {}
        entry["contestants"][name] = outcome
        implementation = check_implementation(context, problem, expected, name, outcome, may_autotune)
        if implementation is not None:
            agreeing[name] = implementation
        context.log(f"    {name}: {outcome['status']} {outcome.get('reason', '')}")
        context.save()
    time_implementations(context, problem, agreeing, entry)


def check_implementation(
    context: Context, problem: Problem, expected: ReferenceValues, name: str, outcome: dict[str, Any],
    may_autotune: bool,
) -> Implementation | None:  # fmt: skip
    """The contestant, if it is there and right; else `outcome` says why it is not."""
    if name in AUTOTUNED and is_installed(name) and not may_autotune:
        outcome.update(status="skipped", reason="tunes itself for minutes at each shape: raise --tuning-shapes")
        return None
    try:
        implementation = find_implementation(name)(problem)
        fill_free_memory_with_nan(context.device, 16 * 2**30)
        with precompile.quick_autotuning():
            found = relative_errors(problem, implementation, expected)
        outcome["errors"] = {key: error if math.isfinite(error) else None for key, error in found.items()}
        outcome["kept_bytes_per_token"] = saved_bytes(problem, implementation)
    except ImportError as error:
        outcome.update(status="not installed", reason=str(error))
    except Exception as error:  # a peer that fails must not end the run
        outcome.update(status="failed", reason=error_summary(error))
    else:
        wrong = tolerance_violations(found, context.dtype)
        outcome.update({"status": "wrong", "reason": wrong} if wrong else {"status": "agrees"})
        return None if wrong else implementation
    free_memory(context)
    return None


def free_memory(context: Context) -> None:
    gc.collect()
    if context.device.type == "cuda":
        torch.cuda.empty_cache()


def time_implementations(
    context: Context, problem: Problem, agreeing: dict[str, Implementation], entry: dict[str, Any]
) -> None:
    matmul, dense_flops = dense_matmul(context.device, context.smoke)
    cases = {DENSE: single_phase(matmul)} | {name: training_case(problem, c) for name, c in agreeing.items()}
    times = time_interleaved(context.clock, cases, *context.rounds_and_repeats)
    entry[DENSE] = rate_statistics(times.seconds[DENSE][0], dense_flops / 1e12, "TFLOP/s")
    for name, why in times.failures.items():
        entry["contestants"][name].update(status="failed", reason=why)
    for name in agreeing.keys() - times.failures.keys():
        forward, backward = times.seconds[name]
        both = [f + b for f, b in zip(forward, backward, strict=True)]
        timed = {"forward": forward, "backward": backward, "both": both}
        entry["contestants"][name]["status"] = "timed"
        for part, seconds in timed.items():
            measured = rate_statistics(seconds, flops_by_phase(problem.shape)[part] / 1e12, "TFLOP/s")
            entry["contestants"][name][part] = measured | {"share": measured["median"] / entry[DENSE]["median"]}


def flops_by_phase(shape: Shape) -> dict[str, int]:
    forward, backward = shape.forward_flops, shape.backward_flops
    return {"forward": forward, "backward": backward, "both": forward + backward}


def training_case(problem: Problem, implementation: Implementation) -> Case:
    def case(end_phase: EndPhase) -> None:
        y_ND = implementation.forward()
        end_phase()
        implementation.gradients(y_ND, problem.dy_ND)
        end_phase()

    return case


def saved_bytes(problem: Problem, implementation: Implementation) -> float:
    """Bytes a token that forward leaves for backward, the input x included, the output and the weights not.

    On a GPU, what is allocated after a forward and was not before; in main memory, what autograd was asked to save.
    """
    x_ND = problem.x_ND
    if x_ND.is_cuda:
        before = torch.cuda.memory_allocated()
        y_ND = implementation.forward()
        grown = torch.cuda.memory_allocated() - before - y_ND.nbytes
        return (grown + x_ND.nbytes) / problem.shape.T
    saved: dict[int, int] = {}

    def record_saved(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(record_saved, lambda t: t):
        y_ND = implementation.forward()
    for given in (*implementation.leaves.values(), y_ND):
        saved.pop(given.untyped_storage().data_ptr(), None)
    return (sum(saved.values()) + x_ND.nbytes) / problem.shape.T
