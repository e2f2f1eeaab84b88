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
from .check import Expected, disagreement, errors, reference
from .context import Context
from .measure import Case, Lap, dense_product, once, poison, rate, reason, take_turns
from .peers import TUNES_ITSELF, Contestant, Problem, find, installed
from .shapes import SHAPES, SMOKE, Shape

SECONDS_FOR_A_SHAPE = 20.0  # what a shape takes at least, once its kernels are compiled
DENSE = "dense"


def run(context: Context, record: dict[str, Any]) -> None:
    """Fill record["shapes"], one entry a shape."""
    shapes = SMOKE if context.smoke else SHAPES
    record["shapes"] = []
    if not context.smoke:
        precompile.run(context, shapes)
    for index, shape in enumerate(shapes):
        if context.left() < SECONDS_FOR_A_SHAPE and not context.smoke:
            context.say(f"  {shape}: skipped, {context.left():.0f} s are left; use a larger --minutes")
            record.setdefault("skipped", []).append(str(shape))
            continue
        entry: dict[str, Any] = {"shape": described(shape, context.dtype.itemsize), "contestants": {}}
        record["shapes"].append(entry)
        measure(context, shape, entry, may_tune=index < context.tuning_shapes)
        release(context)
        context.save()


def described(shape: Shape, element: int) -> dict[str, Any]:
    sizes = {name: getattr(shape, name) for name in "TDFEK"}
    formula = {"kept_bytes_formula": shape.kept_bytes(element), "forward_flops": shape.forward_flops}
    return {**sizes, "note": shape.note, **formula, "backward_flops": shape.backward_flops}


def measure(context: Context, shape: Shape, entry: dict[str, Any], may_tune: bool) -> None:
    """Check every contestant at this shape, then time those that agree."""
    context.say(f"  {shape} {shape.note}")
    problem = Problem.random(shape, context.dtype, context.device)
    expected = reference(problem)
    agreeing: dict[str, Contestant] = {}
    for name in context.contestants:
        outcome: dict[str, Any] = {}
        entry["contestants"][name] = outcome
        contestant = admit(context, problem, expected, name, outcome, may_tune)
        if contestant is not None:
            agreeing[name] = contestant
        context.say(f"    {name}: {outcome['status']} {outcome.get('reason', '')}")
        context.save()
    time_all(context, problem, agreeing, entry)


def admit(
    context: Context, problem: Problem, expected: Expected, name: str, outcome: dict[str, Any], may_tune: bool
) -> Contestant | None:  # fmt: skip
    """The contestant, if it is there and right; else `outcome` says why it is not."""
    if name in TUNES_ITSELF and installed(name) and not may_tune:
        outcome.update(status="skipped", reason="tunes itself for minutes at each shape: raise --tuning-shapes")
        return None
    try:
        contestant = find(name)(problem)
        poison(context.device, 16 * 2**30)
        with precompile.quick_autotuning():
            found = errors(problem, contestant, expected)
        outcome["errors"] = {key: error if math.isfinite(error) else None for key, error in found.items()}
        outcome["kept_bytes_per_token"] = kept_bytes(problem, contestant)
    except ImportError as error:
        outcome.update(status="not installed", reason=str(error))
    except Exception as error:  # a peer that fails must not end the run
        outcome.update(status="failed", reason=reason(error))
    else:
        wrong = disagreement(found, context.dtype)
        outcome.update({"status": "wrong", "reason": wrong} if wrong else {"status": "agrees"})
        return None if wrong else contestant
    release(context)
    return None


def release(context: Context) -> None:
    gc.collect()
    if context.device.type == "cuda":
        torch.cuda.empty_cache()


def time_all(context: Context, problem: Problem, agreeing: dict[str, Contestant], entry: dict[str, Any]) -> None:
    product, dense_flops = dense_product(context.device, context.smoke)
    cases = {DENSE: once(product)} | {name: training_case(problem, c) for name, c in agreeing.items()}
    turns = take_turns(context.clock, cases, *context.turns)
    entry[DENSE] = rate(turns.seconds[DENSE][0], dense_flops / 1e12, "TFLOP/s")
    for name, why in turns.failures.items():
        entry["contestants"][name].update(status="failed", reason=why)
    for name in agreeing.keys() - turns.failures.keys():
        forward, backward = turns.seconds[name]
        both = [f + b for f, b in zip(forward, backward, strict=True)]
        timed = {"forward": forward, "backward": backward, "both": both}
        entry["contestants"][name]["status"] = "timed"
        for part, seconds in timed.items():
            measured = rate(seconds, flops(problem.shape)[part] / 1e12, "TFLOP/s")
            entry["contestants"][name][part] = measured | {"share": measured["median"] / entry[DENSE]["median"]}


def flops(shape: Shape) -> dict[str, int]:
    forward, backward = shape.forward_flops, shape.backward_flops
    return {"forward": forward, "backward": backward, "both": forward + backward}


def training_case(problem: Problem, contestant: Contestant) -> Case:
    def case(lap: Lap) -> None:
        y_ND = contestant.forward()
        lap()
        contestant.gradients(y_ND, problem.dy_ND)
        lap()

    return case


def kept_bytes(problem: Problem, contestant: Contestant) -> float:
    """Bytes a token that forward leaves for backward, the input x included, the output and the weights not.

    On a GPU, what is allocated after a forward and was not before; in main memory, what autograd was asked to save.
    """
    x_ND = problem.x_ND
    if x_ND.is_cuda:
        before = torch.cuda.memory_allocated()
        y_ND = contestant.forward()
        grown = torch.cuda.memory_allocated() - before - y_ND.nbytes
        return (grown + x_ND.nbytes) / problem.shape.T
    saved: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        y_ND = contestant.forward()
    for given in (*contestant.leaves.values(), y_ND):
        saved.pop(given.untyped_storage().data_ptr(), None)
    return (sum(saved.values()) + x_ND.nbytes) / problem.shape.T
