"""A training run: options, checks, trainer, optimizer, metrics, and the loop that joins them."""

from typing import TYPE_CHECKING

from ..lazy_exports import on_first_use

if TYPE_CHECKING:
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
    )  # fmt: skip
    from .from_python import train
    from .optimizer import Optimizer
    from .pipeline import Pipeline
    from .trainer import Trainer

__all__ = [
    "BatchConfig", "CheckpointConfig", "ComputeConfig", "HealthConfig", "MetricsConfig", "Optimizer", "OptimizerConfig",
    "ParallelConfig", "Pipeline", "SampleConfig", "TrainConfig", "Trainer", "train",
]  # fmt: skip
__getattr__ = on_first_use(__name__)
