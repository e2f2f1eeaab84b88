"""A training run: its options, its steps, what else it may do (extensions/), and the loop that joins them.

`loop.py` is the run on a page; `run.py` opens it, and `options.py` reads what was typed.
"""

from ..pipeline.pipeline import Pipeline
from ..runtime.optimizer import Optimizer
from .config import (
    BatchConfig,
    CheckpointConfig,
    ComputeConfig,
    HealthConfig,
    MetricsConfig,
    OptimizerConfig,
    ParallelConfig,
    SampleConfig,
    TrainConfig,
)
from .run import train
from .step import Trainer

__all__ = [
    "BatchConfig", "CheckpointConfig", "ComputeConfig", "HealthConfig", "MetricsConfig", "Optimizer", "OptimizerConfig",
    "ParallelConfig", "Pipeline", "SampleConfig", "TrainConfig", "Trainer", "train",
]  # fmt: skip
