"""The options of the optimizer, and the learning rate of each step: linear warm-up, then one of two schedules.

cosine   cosine decay, which depends on the length of the run
wsd      warm-up, stable, decay (arXiv 2404.06395): constant until the last steps, so that a run can be continued to any
         length from a checkpoint before the decay; the decay is 1 - sqrt (arXiv 2405.18392)
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

PEAKS = {"muon": 0.015, "adamw": 0.003}
"""The default peak learning rate of each optimizer."""


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """Optimizer and learning rate."""

    name: Literal["auto", "adamw", "muon"] = "auto"
    """adamw, or muon: Muon for the matrices inside the blocks, AdamW for all other parameters.
    auto: muon for a new model; adamw with --weights or --lora."""
    lr: float | None = None
    """Peak learning rate. None: 0.015 with muon, 0.003 with adamw."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """Learning rate after warm-up. cosine: cosine decay. wsd: constant, then 1 - sqrt decay over decay_steps."""
    warmup_steps: int = 20
    """Steps of linear warm-up."""
    decay_steps: int | None = None
    """wsd: steps of the final decay. None: a fifth of all steps."""
    final_lr: float = 0.1
    """Final learning rate, as a fraction of the peak."""
    beta1: float = 0.9
    """adamw: decay rate of the first moment."""
    beta2: float = 0.95
    """adamw: decay rate of the second moment."""
    momentum: float = 0.95
    """muon: decay rate of the momentum."""
    weight_decay: float = 0.1
    """Decoupled weight decay; applied to matrices only."""
    clip: float | None = 1.0
    """Clip the gradient norm of the whole model to this value. None: no clipping."""

    @property
    def peak(self) -> float:
        """The peak learning rate: `lr`, or the default of the optimizer."""
        return PEAKS["adamw" if self.name == "adamw" else "muon"] if self.lr is None else self.lr

    def chosen(self, new_model: bool) -> "OptimizerConfig":
        """These options with an optimizer in place of `auto`, and a learning rate in place of None."""
        automatic = "muon" if new_model else "adamw"
        named = replace(self, name=automatic) if self.name == "auto" else self
        return replace(named, lr=named.peak)


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The learning rate of `step`, from 0 to `total_steps` - 1. The last step has `final_lr` times the peak."""
    if step < config.warmup_steps:
        return config.peak * (step + 1) / config.warmup_steps
    if config.schedule == "cosine":
        progress = (step - config.warmup_steps) / max(1, total_steps - 1 - config.warmup_steps)
        shape = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    else:
        steps = decay_steps(config, total_steps)
        shape = 1 - math.sqrt(max(0, step + 1 - (total_steps - steps)) / steps)
    return config.peak * (config.final_lr + (1 - config.final_lr) * shape)


def decay_steps(config: OptimizerConfig, total_steps: int) -> int:
    """The number of decay steps of `wsd`."""
    return config.decay_steps or -(-total_steps // 5)
