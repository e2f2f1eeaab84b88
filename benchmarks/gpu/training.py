"""Training steps of a whole model on one GPU, with different experts in it: how fast, and how far in a given time.

The runs differ in the experts only: the same initial weights, the same batches in the same order, real text (the
standard library's own source), AdamW as train.py does it. The first steps compile and are not on the clock.

Utilisation is the model FLOPs of a token (planner/flops.py), times tokens per second, over the dense product's rate.
"""

import dataclasses
import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_dualpipe.data import batches as data
from moe_dualpipe.models import ModelConfig, TransformerStage, build_model, next_token_loss, preset
from moe_dualpipe.planner.flops import train_flops_per_token
from moe_dualpipe.runtime.groups import Groups
from moe_dualpipe.runtime.replicas import replica_sets
from moe_dualpipe.training.optimizer import Optimizer, OptimizerConfig

from .context import Context
from .measure import Quartiles, ceilings, rate, reason

SEQUENCES, LENGTH = 16, 1024  # a step
WARM_UP = 5  # steps that are not on the clock
OVERHEAD = 12.0  # seconds to build a model and compile its kernels
OPTIMIZER = OptimizerConfig(lr=1e-3, warmup_steps=100)
# name -> (kernels, expert layer)
RUNS = {
    "triton": ("triton", "swiglu"),
    "reference": ("reference", "swiglu"),
    "loop": ("reference", "benchmarks.gpu.loop_experts:LoopExperts"),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What every run has in common."""

    config: ModelConfig
    text: data.TextData
    sequences: int
    length: int
    warm_up: int
    seconds: float

    @property
    def tokens(self) -> int:
        return self.sequences * self.length


@dataclass(slots=True)
class Trained:
    """Seconds of each step on the clock, and the loss of every step."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def run(context: Context, record: dict[str, Any]) -> None:
    """Fill record["runs"]: by name, tokens/s, utilisation, peak memory, losses."""
    wanted = 0.0 if context.smoke else context.training_seconds
    seconds = min(wanted, context.left() / len(RUNS) - OVERHEAD) if not context.smoke else 0.0
    if wanted and seconds < 5:
        context.say(f"  skipped: {context.left():.0f} s are left for {len(RUNS)} runs; use a larger --minutes")
        record.update(status="skipped", reason=f"skipped, {context.left():.0f} s were left")
        return
    if seconds < wanted:
        context.say(f"  {seconds:.0f} s a run instead of {wanted:.0f}, to stay within the time")
    plan = planned(context, seconds)
    dense = context.results.get("ceilings") or ceilings(context.clock, context.smoke)
    record.update(seconds=seconds, tokens_per_step=plan.tokens, sequence_length=plan.length, runs={})
    for name, (kernels, experts) in RUNS.items():
        record["runs"][name] = attempt(context, plan, kernels, experts, dense["dense"]["median"])
        context.say(f"  {name}: {summary(record['runs'][name])}")
        context.save()


def planned(context: Context, seconds: float) -> Plan:
    if context.smoke:
        config = ModelConfig(
            hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, dense_size=64, expert_size=16,
            num_experts=4,
        )  # fmt: skip
        return Plan(config, data.load("stdlib", 16), 2, 16, 1, seconds)
    return Plan(preset("small"), data.load("stdlib", LENGTH), SEQUENCES, LENGTH, WARM_UP, seconds)


def attempt(context: Context, plan: Plan, kernels: str, experts: str, dense: float) -> dict[str, Any]:
    try:
        return train(context, plan, kernels, experts, dense)
    except Exception as error:  # one run that fails must not end the others
        return {"status": "failed", "reason": reason(error)}
    finally:
        gc.collect()
        if context.device.type == "cuda":
            torch.cuda.empty_cache()


def train(context: Context, plan: Plan, kernels: Any, experts: str, dense: float) -> dict[str, Any]:
    config = dataclasses.replace(plan.config, experts=experts)
    model = build_model(config, kernels=kernels).to(context.device, context.dtype)
    flops = train_flops_per_token(config, plan.length)
    if context.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trained = train_for(context, plan, model)
    per_second = rate(trained.seconds, plan.tokens, "tokens/s")
    return {
        "status": "timed", "steps": len(trained.losses), "tokens_per_s": per_second, "flops_per_token": flops,
        "utilisation": per_second["median"] * flops / (dense * 1e12),
        "step_ms": 1e3 * Quartiles.of(trained.seconds).median, "peak_memory_gb": peak_memory_gb(context),
        "first_losses": trained.losses[:3], "loss": validation_loss(context, plan, model),
        "curve": curve(plan, trained),
    }  # fmt: skip


def train_for(context: Context, plan: Plan, model: TransformerStage) -> Trained:
    """Steps for `plan.seconds` after the warm-up, two at least."""
    optimizer = Optimizer(replica_sets([model], Groups()), OPTIMIZER)
    trained, used = Trained(), 0.0
    for step, (x_BS, y_BS) in enumerate(batches(context, plan)):
        start = time.perf_counter()
        loss = next_token_loss(model(x_BS), y_BS)
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        lr = OPTIMIZER.lr * min(1.0, (step + 1) / OPTIMIZER.warmup_steps)
        optimizer.step(lr, OPTIMIZER.clip / norm.clamp(min=OPTIMIZER.clip))
        trained.losses.append(loss.item())  # waits for the device
        if step >= plan.warm_up:
            trained.seconds.append(time.perf_counter() - start)
            used += trained.seconds[-1]
            if used >= plan.seconds and len(trained.seconds) > 1:
                break
    return trained


def batches(context: Context, plan: Plan) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    step = 0
    while True:
        x_BS, y_BS = plan.text.batch(0, step, 0, plan.sequences, plan.length)
        yield x_BS.to(context.device), y_BS.to(context.device)
        step += 1


@torch.no_grad()
def validation_loss(context: Context, plan: Plan, model: TransformerStage) -> float:
    """Nats per byte, over held-out text."""
    count = 2 if context.smoke else 64
    losses = []
    for first in range(0, count, plan.sequences):
        x_BS, y_BS = plan.text.held_out_batch(first, plan.sequences, count, plan.length)
        losses.append(next_token_loss(model(x_BS.to(context.device)), y_BS.to(context.device)).item())
    return sum(losses) / len(losses)


def curve(plan: Plan, trained: Trained, points: int = 40) -> list[tuple[float, float]]:
    """(seconds on the clock, training loss averaged since the last point), for a figure."""
    losses = trained.losses[plan.warm_up :]
    every = max(1, len(losses) // points)
    ends = range(every, len(losses) + 1, every)
    return [(sum(trained.seconds[:end]), sum(losses[end - every : end]) / every) for end in ends]


def peak_memory_gb(context: Context) -> float | None:
    return torch.cuda.max_memory_allocated() / 1e9 if context.device.type == "cuda" else None


def summary(outcome: dict[str, Any]) -> str:
    if outcome["status"] != "timed":
        return f"{outcome['status']}, {outcome['reason']}"
    return f"{outcome['tokens_per_s']['median']:,.0f} tokens/s, {outcome['steps']} steps, loss {outcome['loss']:.4f}"
