"""Section "experts": the expert MLP against other implementations: forward, backward and memory saved for backward.

An implementation is timed only if it agrees with fp64. Forward and backward are timed together, as in training.
Rates are also given as shares of a dense matmul that is timed interleaved with the implementations.
"""

import gc

import torch
from torch import Tensor

from . import measure, precompile
from .context import Context, Operation
from .correctness import ReferenceValues, compute_reference, relative_errors, tolerance_violations
from .implementations import Implementation, Problem, find_implementation
from .measure import EndPhase, dense_matmul, single_phase
from .shapes import SHAPES, SMOKE_SHAPES, Shape

MIN_SECONDS_PER_SHAPE = 20.0  # once the kernels are compiled


def run(context: Context) -> None:
    """Add the TFLOP/s and the saved bytes of each implementation at each shape."""
    shapes = SMOKE_SHAPES if context.smoke else SHAPES
    if not context.smoke:
        precompile.precompile(context, shapes)
    for shape in shapes:
        if context.seconds_left() < MIN_SECONDS_PER_SHAPE and not context.smoke:
            left = f"{context.seconds_left():.0f} s are left; use a larger --minutes"
            context.add(str(shape), "all", status="skipped", reason=left)
            continue
        measure_shape(context, shape)
        gc.collect()
        if context.device.type == "cuda":
            torch.cuda.empty_cache()


def measure_shape(context: Context, shape: Shape) -> None:
    problem = Problem.random(shape, context.dtype, context.device)
    expected = compute_reference(problem)
    matmul, matmul_flops = dense_matmul(context.device, context.smoke)
    operations = {"dense matmul": Operation(single_phase(matmul), {"": matmul_flops / 1e12}, "TFLOP/s")}
    work = {"forward": shape.forward_flops / 1e12, "backward": shape.backward_flops / 1e12}
    for name in context.implementations:
        contestant = Contestant(context, problem, expected, name)
        operations[name] = Operation(contestant.run, work, "TFLOP/s", contestant.fault)
    context.compare(str(shape), operations, reference="dense matmul")


class Contestant:
    """One implementation of the layer, which `fault` builds."""

    implementation: Implementation

    def __init__(self, context: Context, problem: Problem, expected: ReferenceValues, name: str):
        self.context, self.problem, self.expected, self.name = context, problem, expected, name

    def fault(self) -> str:
        """Build the implementation, compare it with fp64, and measure the memory that it saves for backward."""
        self.implementation = find_implementation(self.name)(self.problem)
        measure.fill_free_memory_with_nan(self.context.device, 16 * 2**30)
        errors = relative_errors(self.problem, self.implementation, self.expected)
        if violations := tolerance_violations(errors, self.context.dtype):
            return violations
        saved = saved_bytes_per_token(self.problem, self.implementation)
        share = saved / self.problem.shape.saved_bytes(self.context.dtype.itemsize)
        what, phase = str(self.problem.shape), "saved for backward, against 2D + 4KF"
        self.context.add(what, self.name, phase, median=saved, unit="bytes per token", share=share)
        return ""

    def run(self, end_phase: EndPhase) -> None:
        y_ND = self.implementation.forward()
        end_phase()
        self.implementation.gradients(y_ND, self.problem.dy_ND)
        end_phase()


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
