"""Section "training": train a whole model on one GPU with different expert layers; compare speed and loss.

The runs differ only in the experts. They share the initial weights, the batches and their order, real text (the source
of Python's standard library), and AdamW as in train.py. The first steps compile kernels and are not timed.

Utilisation is model FLOPs per token (models/costs.py) x tokens per second / the rate of a dense matmul.
"""

import dataclasses
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_dualpipe.data import TextData, load_data
from moe_dualpipe.models import ModelConfig, StageOptions, TransformerStage, build_model, next_token_loss, preset
from moe_dualpipe.models.costs import train_flops_per_token
from moe_dualpipe.runtime.groups import Groups
from moe_dualpipe.runtime.optimizer import Optimizer
from moe_dualpipe.runtime.replicas import replica_sets
from moe_dualpipe.training.config import OptimizerConfig

from .context import Context
from .measure import Quartiles, error_summary, measure_ceilings, rate_statistics

NUM_SEQUENCES, SEQUENCE_LENGTH = 16, 1024  # per step
WARM_UP_STEPS = 5  # steps before timing starts
SETUP_SECONDS = 12.0  # per run, to build the model and compile its kernels
CLIP = 1.0  # maximum gradient norm
OPTIMIZER = OptimizerConfig(lr=1e-3, warmup_steps=100)
# name -> (kernels, expert layer)
RUNS = {
    "triton": ("triton", "swiglu"),
    "reference": ("reference", "swiglu"),
    "loop": ("reference", "benchmarks.gpu.loop_experts:LoopExperts"),
}


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """What all runs share."""

    config: ModelConfig
    text: TextData
    sequences: int
    length: int
    warm_up: int
    seconds: float

    @property
    def tokens(self) -> int:
        return self.sequences * self.length


@dataclass(slots=True)
class TrainingHistory:
    """Seconds of each timed step, and the loss of every step."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def run(context: Context, record: dict[str, Any]) -> None:
    """Fill record["runs"]: by name, tokens/s, utilisation, peak memory and losses."""
    wanted = 0.0 if context.smoke else context.training_seconds
    seconds = min(wanted, context.seconds_left() / len(RUNS) - SETUP_SECONDS) if not context.smoke else 0.0
    if wanted and seconds < 5:
        context.log(f"  skipped: {context.seconds_left():.0f} s are left for {len(RUNS)} runs; use a larger --minutes")
        record.update(status="skipped", reason=f"skipped, {context.seconds_left():.0f} s were left")
        return
    if seconds < wanted:
        context.log(f"  {seconds:.0f} s per run instead of {wanted:.0f}, to finish in time")
    setup = build_setup(context, seconds)
    dense = context.results.get("ceilings") or measure_ceilings(context.clock, context.smoke)
    record.update(seconds=seconds, tokens_per_step=setup.tokens, sequence_length=setup.length, runs={})
    for name, (kernels, experts) in RUNS.items():
        record["runs"][name] = try_train(context, setup, kernels, experts, dense["dense"]["median"])
        context.log(f"  {name}: {summary_line(record['runs'][name])}")
        context.save()


def build_setup(context: Context, seconds: float) -> TrainingSetup:
    if context.smoke:
        config = ModelConfig(
            hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, dense_size=64, expert_size=16,
            num_experts=4,
        )  # fmt: skip
        return TrainingSetup(config, load_data("stdlib", 16), 2, 16, 1, seconds)
    return TrainingSetup(
        preset("small"), load_data("stdlib", SEQUENCE_LENGTH), NUM_SEQUENCES, SEQUENCE_LENGTH, WARM_UP_STEPS, seconds
    )


def try_train(context: Context, setup: TrainingSetup, kernels: str, experts: str, dense: float) -> dict[str, Any]:
    try:
        return train(context, setup, kernels, experts, dense)
    except Exception as error:  # a run that fails must not end the others
        return {"status": "failed", "reason": error_summary(error)}
    finally:
        gc.collect()
        if context.device.type == "cuda":
            torch.cuda.empty_cache()


def train(context: Context, setup: TrainingSetup, kernels: Any, experts: str, dense: float) -> dict[str, Any]:
    config = dataclasses.replace(setup.config, experts=experts)
    model = build_model(config, options=StageOptions(kernels=kernels)).to(context.device, context.dtype)
    flops = train_flops_per_token(config, setup.length)
    if context.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    history = train_for(context, setup, model)
    per_second = rate_statistics(history.seconds, setup.tokens, "tokens/s")
    return {
        "status": "timed", "steps": len(history.losses), "tokens_per_s": per_second, "flops_per_token": flops,
        "utilisation": per_second["median"] * flops / (dense * 1e12),
        "step_ms": 1e3 * Quartiles.of(history.seconds).median, "peak_memory_gb": peak_memory_gb(context),
        "first_losses": history.losses[:3], "loss": validation_loss(context, setup, model),
        "curve": loss_curve(setup, history),
    }  # fmt: skip


def train_for(context: Context, setup: TrainingSetup, model: TransformerStage) -> TrainingHistory:
    """Train for `setup.seconds` after the warm-up, at least two timed steps."""
    optimizer = Optimizer(replica_sets([model], Groups()), OPTIMIZER)
    history, used = TrainingHistory(), 0.0
    for step, (x_BS, y_BS) in enumerate(device_batches(context, setup)):
        start = time.perf_counter()
        loss = next_token_loss(model(x_BS), y_BS)
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        lr = OPTIMIZER.lr * min(1.0, (step + 1) / OPTIMIZER.warmup_steps)
        optimizer.step(lr, CLIP / norm.clamp(min=CLIP))
        history.losses.append(loss.item())  # waits for the device
        if step >= setup.warm_up:
            history.seconds.append(time.perf_counter() - start)
            used += history.seconds[-1]
            if used >= setup.seconds and len(history.seconds) > 1:
                break
    return history


def device_batches(context: Context, setup: TrainingSetup) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    step = 0
    while True:
        x_BS, y_BS = setup.text.batch(0, step, setup.sequences, setup.length)
        yield x_BS.to(context.device), y_BS.to(context.device)
        step += 1


@torch.no_grad()
def validation_loss(context: Context, setup: TrainingSetup, model: TransformerStage) -> float:
    """Return the mean loss on held-out text, in nats per byte."""
    count = 2 if context.smoke else 64
    losses = []
    for first in range(0, count, setup.sequences):
        x_BS, y_BS = setup.text.held_out_batch(first, setup.sequences, count, setup.length)
        losses.append(next_token_loss(model(x_BS.to(context.device)), y_BS.to(context.device)).item())
    return sum(losses) / len(losses)


def loss_curve(setup: TrainingSetup, history: TrainingHistory, points: int = 40) -> list[tuple[float, float]]:
    """Return points (training seconds, training loss averaged since the previous point) for a figure."""
    losses = history.losses[setup.warm_up :]
    every = max(1, len(losses) // points)
    ends = range(every, len(losses) + 1, every)
    return [(sum(history.seconds[:end]), sum(losses[end - every : end]) / every) for end in ends]


def peak_memory_gb(context: Context) -> float | None:
    return torch.cuda.max_memory_allocated() / 1e9 if context.device.type == "cuda" else None


def summary_line(outcome: dict[str, Any]) -> str:
    if outcome["status"] != "timed":
        return f"{outcome['status']}, {outcome['reason']}"
    return f"{outcome['tokens_per_s']['median']:,.0f} tokens/s, {outcome['steps']} steps, loss {outcome['loss']:.4f}"
