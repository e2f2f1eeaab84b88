"""Section "training": train a whole model on one GPU in several ways; compare speed and loss.

The runs differ only in the kernels, and in whether a step is a CUDA graph. They share the initial weights, the batches
and their order, and real text (the source of Python's standard library, as bytes).
"""

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from moe_dualpipe.kernels.options import Kernels
from moe_dualpipe.models import StageOptions, preset
from moe_dualpipe.pipeline import Numerics, Pipeline
from moe_dualpipe.runtime.learning_rate import OptimizerConfig, learning_rate
from moe_dualpipe.runtime.world import join_world
from moe_dualpipe.schedule import build

from .context import Context
from .measure import Quartiles, error_summary

CASES: dict[str, tuple[Kernels, Literal["", "cuda_graph"]]] = {
    "triton": ("triton", ""), "reference": ("reference", ""), "triton, CUDA graphs": ("triton", "cuda_graph"),
}  # fmt: skip
"""In this order: a capture that fails must not end the others."""
WARM_UP_STEPS = 5
SIZE, LENGTH = 16, 1024
OPTIMIZER = OptimizerConfig("adamw")


def run(context: Context) -> None:
    """Add the tokens/s, peak memory and losses of each run."""
    what, cases = f"small, {SIZE} sequences of {LENGTH:,} tokens", dict(CASES)
    if context.device.type != "cuda":
        cases.popitem()  # no CUDA graphs
    for number, name in enumerate(cases):
        try:
            with join_world(context.device.type):
                measure_run(context, what, name, context.seconds_left() / (len(cases) - number))
        except Exception as error:  # a run that fails must not end the others
            context.add(what, name, status="failed", reason=error_summary(error))
        context.save()


def measure_run(context: Context, what: str, name: str, seconds: float) -> None:
    """Train for `context.training_steps`, or until the time is up."""
    kernels, whole = CASES[name]
    model, size, length = preset("small"), SIZE, LENGTH
    if context.smoke:
        model, size, length = replace(preset("tiny"), num_layers=2, hidden_size=32), 2, 16
    numerics = Numerics(context.device, context.dtype, StageOptions(kernels=kernels), whole)
    pipeline = Pipeline(model, build("1f1b", 1, 1), (size, length), numerics=numerics)
    optimizer = pipeline.optimizer(OPTIMIZER)
    losses, times, end = list[float](), list[float](), time.monotonic() + seconds
    if context.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step, batch in zip(range(context.training_steps), batches(size, length), strict=False):
        start = time.perf_counter()
        (loss,) = pipeline.step(*batch, sum_gradients=True)
        norm = pipeline.sum_gradients()
        optimizer.step(learning_rate(OPTIMIZER, step, context.training_steps), 1 / norm.clamp(min=1.0))
        losses.append(loss.item())
        times.append(time.perf_counter() - start)
        if time.monotonic() > end:
            break
    speed = Quartiles.of([size * length / t for t in times[min(WARM_UP_STEPS, len(times) - 1) :]])
    context.add(what, name, "", median=speed.median, low=speed.low, high=speed.high, unit="tokens/s")
    context.add(what, name, "first step", median=times[0], unit="s")
    if context.device.type == "cuda":
        context.add(what, name, "peak memory", median=torch.cuda.max_memory_allocated() / 2**30, unit="GiB")
    context.add(what, name, f"loss of step {len(losses)}", median=losses[-1], unit="nats per byte")


def batches(size: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and labels [size, length]: the text in order, from its start again after its end."""
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, length + 1, length)
    for step in itertools.count():
        rows = windows[(step * size + torch.arange(size)) % len(windows)]
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
