"""Send the metrics of a run to any object with a method `log(dict)`, in addition to metrics.jsonl.

TensorBoard (`metrics.tensorboard`) and Weights & Biases (`--wandb`) are two of them. An error while logging does not
end the run: it is printed once, as a warning.
"""

import dataclasses
from pathlib import Path
from typing import Any, Protocol

from ..errors import describe_user_error
from ..health.report import warn
from ..integrations.trackers import TensorBoard, WandbRun
from .config import TrainConfig


class Sink(Protocol):
    """Receives the records of a run, on its first rank. An optional method `close()` is called at the end."""

    def log(self, record: dict[str, Any]) -> object:
        """Receive a copy of a record: the step and the metrics, as in metrics.jsonl, but with NaN instead of null."""
        ...


class GuardedSink:
    """Passes records on to `sink`, whose errors are printed once and never raised."""

    def __init__(self, sink: Sink):
        self._sink, self._warned = sink, False

    def log(self, record: dict[str, Any]) -> None:
        try:
            self._sink.log(dict(record))
        except Exception as error:
            if not self._warned:
                what = f"{type(self._sink).__name__} cannot log step {record.get('step')}"
                warn(f"{what}: {describe_user_error(error)}; the run continues and tries again")
            self._warned = True

    def close(self) -> None:
        close = getattr(self._sink, "close", None)
        try:
            if close is not None:
                close()
        except Exception as error:
            warn(f"{type(self._sink).__name__} cannot be closed: {describe_user_error(error)}")


def chosen_sinks(config: TrainConfig, folder: Path, first_step: int) -> list[Sink]:
    """The sinks that the options choose. Raises ValueError for one that cannot start."""
    metrics, options = config.metrics, dataclasses.asdict(config)
    wandb = [WandbRun(metrics.wandb, options, folder)] if metrics.wandb else []  # first: it may be refused
    return [*wandb, *([TensorBoard(folder, first_step)] if metrics.tensorboard else [])]
