"""Run schedules on torch.distributed: process groups, links between ranks, stages, replicas, and the executor."""

from .executor import Executor
from .p2p import P2P, TensorSpec
from .rank_step import StepResult
from .stage import Criterion, OverlappedModule, Stage
from .world import World, join_world

__all__ = [
    "P2P", "Criterion", "Executor", "OverlappedModule", "Stage", "StepResult", "TensorSpec", "World", "join_world",
]  # fmt: skip
