"""Section "experts": the expert MLP against other implementations: forward, backward and memory saved for backward.

An implementation is timed only if it agrees with fp64. Forward and backward are timed together, as in training.
Rates are also given as shares of a dense matmul that is timed interleaved with the implementations.
"""

import gc
import math
from typing import Any

import torch
from torch import Tensor

from . import measure, precompile
from .context import Context
from .correctness import ReferenceValues, compute_reference, relative_errors, tolerance_violations
from .implementations import AUTOTUNED, Implementation, Problem, find_implementation, is_installed
from .measure import Case, EndPhase, dense_matmul, error_summary, rate_statistics, single_phase
from .shapes import SHAPES, SMOKE_SHAPES, Shape

MIN_SECONDS_PER_SHAPE = 20.0  # once the kernels are compiled
DENSE = "dense"


def run(context: Context, record: dict[str, Any]) -> None:
    """Fill record["shapes"] with one entry per shape."""
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
    """Check every implementation at this shape, then time those that are correct."""
    context.log(f"  {shape} {shape.note}")
    problem = Problem.random(shape, context.dtype, context.device)
    expected = compute_reference(problem)
    correct: dict[str, Implementation] = {}
    for name in context.implementations:
        outcome: dict[str, Any] = {}
        entry["contestants"][name] = outcome
        if name in AUTOTUNED and is_installed(name) and not may_autotune:
            outcome.update(status="skipped", reason="autotunes for minutes at each shape: raise --tuning-shapes")
        elif implementation := check_implementation(context, problem, expected, name, outcome):
            correct[name] = implementation
        context.log(f"    {name}: {outcome['status']} {outcome.get('reason', '')}")
        context.save()
    time_implementations(context, problem, correct, entry)


def check_implementation(
    context: Context, problem: Problem, expected: ReferenceValues, name: str, outcome: dict[str, Any]
) -> Implementation | None:  # fmt: skip
    """Return the implementation if it is installed and correct; otherwise write the reason to `outcome`."""
    try:
        implementation = find_implementation(name)(problem)
        measure.fill_free_memory_with_nan(context.device, 16 * 2**30)
        with precompile.quick_autotuning():
            found = relative_errors(problem, implementation, expected)
        outcome["errors"] = {key: error if math.isfinite(error) else None for key, error in found.items()}
        outcome["kept_bytes_per_token"] = saved_bytes_per_token(problem, implementation)
    except ImportError as error:
        outcome.update(status="not installed", reason=str(error))
    except Exception as error:  # an implementation that fails must not end the run
        outcome.update(status="failed", reason=error_summary(error))
    else:
        violations = tolerance_violations(found, context.dtype)
        outcome.update({"status": "wrong", "reason": violations} if violations else {"status": "agrees"})
        return None if violations else implementation
    free_memory(context)
    return None


def free_memory(context: Context) -> None:
    gc.collect()
    if context.device.type == "cuda":
        torch.cuda.empty_cache()


def time_implementations(
    context: Context, problem: Problem, correct: dict[str, Implementation], entry: dict[str, Any]
) -> None:  # fmt: skip
    matmul, matmul_flops = dense_matmul(context.device, context.smoke)
    cases = {DENSE: single_phase(matmul)} | {name: training_case(problem, i) for name, i in correct.items()}
    times = measure.time_interleaved(context.clock, cases, *context.rounds_and_repeats)
    entry[DENSE] = rate_statistics(times.seconds[DENSE][0], matmul_flops / 1e12, "TFLOP/s")
    for name, message in times.failures.items():
        entry["contestants"][name].update(status="failed", reason=message)
    flops = {"forward": problem.shape.forward_flops, "backward": problem.shape.backward_flops}
    flops["both"] = sum(flops.values())
    for name in correct.keys() - times.failures.keys():
        forward, backward = times.seconds[name]
        seconds = {"forward": forward, "backward": backward, "both": [*map(sum, zip(forward, backward, strict=True))]}
        entry["contestants"][name]["status"] = "timed"
        for phase in flops:
            measured = rate_statistics(seconds[phase], flops[phase] / 1e12, "TFLOP/s")
            entry["contestants"][name][phase] = measured | {"share": measured["median"] / entry[DENSE]["median"]}


def training_case(problem: Problem, implementation: Implementation) -> Case:
    """Return a case with two phases, forward and backward."""

    def case(end_phase: EndPhase) -> None:
        y_ND = implementation.forward()
        end_phase()
        implementation.gradients(y_ND, problem.dy_ND)
        end_phase()

    return case


def saved_bytes_per_token(problem: Problem, implementation: Implementation) -> float:
    """Measure the bytes per token saved for backward, including the input x, excluding the output and the weights.

    On a GPU: the growth of allocated memory during forward. On a CPU: the tensors that autograd saves.
    """
    x_ND = problem.x_ND
    if x_ND.is_cuda:
        before = torch.cuda.memory_allocated()
        y_ND = implementation.forward()
        growth = torch.cuda.memory_allocated() - before - y_ND.nbytes
        return (growth + x_ND.nbytes) / problem.shape.T
    saved: dict[int, int] = {}

    def record_saved(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(record_saved, lambda t: t):
        y_ND = implementation.forward()
    for tensor in (*implementation.leaves.values(), y_ND):
        saved.pop(tensor.untyped_storage().data_ptr(), None)
    return (sum(saved.values()) + x_ND.nbytes) / problem.shape.T
