"""Run schedules on torch.distributed: links between ranks, stages, and the executor that joins them."""

from .executor import Executor, StepResult
from .p2p import P2P, TensorSpec
from .stage import Criterion, Stage, accumulate_gradients

__all__ = ["P2P", "Criterion", "Executor", "Stage", "StepResult", "TensorSpec", "accumulate_gradients"]
