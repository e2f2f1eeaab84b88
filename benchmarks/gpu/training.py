"""Section "training": train a whole model on one GPU with different expert kernels; compare speed and loss.

The runs differ only in the kernels. They share the initial weights, the batches and their order, and real text (the
source of Python's standard library). The first steps compile kernels and are not counted.
"""

import time
from dataclasses import replace
from typing import Any

from moe_dualpipe import training
from moe_dualpipe.kernels.options import Kernels
from moe_dualpipe.models import preset

from .context import Context
from .measure import Quartiles, error_summary

KERNELS: tuple[Kernels, ...] = ("triton", "reference")
WARM_UP_STEPS = 5
SETUP_SECONDS = 12.0  # per run, to build the model and compile its kernels


def run(context: Context) -> None:
    """Add the tokens/s, utilization, peak memory and losses of each run."""
    seconds = min(context.training_seconds, context.seconds_left() / len(KERNELS) - SETUP_SECONDS)
    what = "small, 16 sequences of 1,024 tokens"
    if seconds < 5 and not context.smoke:
        context.add(what, "all", status="skipped", reason=f"{context.seconds_left():.0f} s were left")
        return
    for kernels in KERNELS:
        try:
            measure_run(context, what, kernels, seconds)
        except Exception as error:  # a run that fails must not end the others
            context.add(what, kernels, status="failed", reason=error_summary(error))
        context.save()


class Records:
    """Collects what a run logs, and stops it some seconds after the warm-up."""

    def __init__(self, warm_up: int, seconds: float):
        self.warm_up, self.seconds, self.end = warm_up, seconds, 0.0
        self.steps: list[dict[str, Any]] = []
        self.validation_loss = 0.0

    def log(self, record: dict[str, Any]) -> None:
        self.validation_loss = record.get("validation_loss", self.validation_loss)

    def __call__(self, trainer: training.Trainer, record: dict[str, Any]) -> None:
        self.steps.append(record)
        if len(self.steps) == self.warm_up:
            self.end = time.monotonic() + self.seconds
        if len(self.steps) > self.warm_up and time.monotonic() >= self.end:
            trainer.request_stop()


def measure_run(context: Context, what: str, kernels: Kernels, seconds: float) -> None:
    config = training.TrainConfig(
        model=preset("small"), steps=10**6, parallel=training.ParallelConfig(schedule="1f1b"),
        batch=training.BatchConfig(batch_size=16, micro_batch_size=16, seq_len=1024),
        compute=training.ComputeConfig(device="cuda", kernels=kernels), sample=training.SampleConfig(sample_tokens=0),
    )  # fmt: skip
    if context.smoke:
        config = replace(
            config, steps=3, model=replace(preset("tiny"), num_layers=2, hidden_size=32),
            batch=training.BatchConfig(batch_size=2, micro_batch_size=2, seq_len=16),
            compute=training.ComputeConfig(device="cpu"),
            metrics=training.MetricsConfig(eval_sequences=2),
        )  # fmt: skip
    records = Records(1 if context.smoke else WARM_UP_STEPS, seconds)
    training.train(config, callbacks=[records], log=[records], verbose=False)
    timed = records.steps[records.warm_up :]
    for key in ("tokens_per_s", "mfu", "peak_memory_mb"):
        if key in timed[-1]:
            spread = Quartiles.of([record[key] for record in timed])
            context.add(what, kernels, key, median=spread.median, low=spread.low, high=spread.high, unit="")
    last = f"training loss after {len(records.steps)} steps"
    context.add(what, kernels, last, median=timed[-1]["loss"], unit="nats per byte")
    context.add(what, kernels, "validation loss", median=records.validation_loss, unit="nats per byte")
