"""Send the metrics of a run to any object with a method `log(dict)`, in addition to metrics.jsonl.

TensorBoard (`metrics.tensorboard`) and Weights & Biases (`--wandb`) are two of them. An error while logging does not
end the run: it is printed once, as a warning.
"""

import dataclasses
from pathlib import Path
from typing import Any, Protocol

from ..integrations.trackers import TensorBoard, WandbRun
from .config import TrainConfig


class Sink(Protocol):
    """Receives the records of a run, on its first rank. An optional method `close()` is called at the end."""

    def log(self, record: dict[str, Any]) -> object:
        """Receive a copy of a record: the step and the metrics, as in metrics.jsonl, but with NaN instead of null."""
        ...


def chosen_sinks(config: TrainConfig, folder: Path, first_step: int) -> list[Sink]:
    """The sinks that the options choose. Raises ValueError for one that cannot start."""
    metrics, options = config.metrics, dataclasses.asdict(config)
    wandb = [WandbRun(metrics.wandb, options, folder)] if metrics.wandb else []  # first: it may be refused
    return [*wandb, *([TensorBoard(folder, first_step)] if metrics.tensorboard else [])]
