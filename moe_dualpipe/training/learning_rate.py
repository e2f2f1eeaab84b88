"""The learning rate of each step: linear warm-up, then one of two schedules down to a fraction of the peak.

cosine   cosine decay, which depends on the length of the run
wsd      warm-up, stable, decay (arXiv 2404.06395): constant until the last steps, so that a run can be continued to any
         length from a checkpoint before the decay; the decay is 1 - sqrt (arXiv 2405.18392)
"""

import math

from .config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The learning rate of `step`, from 0 to `total_steps` - 1. The last step has `final_lr` times the peak."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "cosine":
        progress = (step - config.warmup_steps) / max(1, total_steps - 1 - config.warmup_steps)
        shape = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    else:
        steps = decay_steps(config, total_steps)
        shape = 1 - math.sqrt(max(0, step + 1 - (total_steps - steps)) / steps)
    return config.lr * (config.final_lr + (1 - config.final_lr) * shape)


def decay_steps(config: OptimizerConfig, total_steps: int) -> int:
    """The number of decay steps of `wsd`."""
    return config.decay_steps or -(-total_steps // 5)
