"""Send the metrics of a run to any object with a method `log(dict)`, in addition to metrics.jsonl.

TensorBoard (`metrics.tensorboard`) and Weights & Biases (`--wandb`) are two of them. An error while logging does not
end the run: it is printed once, as a warning.
"""

import dataclasses
import importlib.util
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ..messages import describe
from .appended_file import warn
from .config import TrainConfig

ID_FILE = "wandb-id"


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
                warn(f"{what}: {_describe(error)}; the run continues and tries again")
            self._warned = True

    def close(self) -> None:
        close = getattr(self._sink, "close", None)
        try:
            if close is not None:
                close()
        except Exception as error:
            warn(f"{type(self._sink).__name__} cannot be closed: {_describe(error)}")


def _describe(error: Exception) -> str:
    text = ""
    with suppress(Exception):
        text = describe(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def chosen_sinks(config: TrainConfig, folder: Path, first_step: int) -> list[Sink]:
    """The sinks that the options choose. Raises ValueError for one that cannot start."""
    tensorboard = [TensorBoard(folder, first_step)] if config.metrics.tensorboard else []
    return [*tensorboard, *([WandbRun(config, folder)] if config.metrics.wandb else [])]


def check_installed(config: TrainConfig) -> None:
    """Raise ValueError if a package is missing. A folder that W&B has written, named wandb, is not the package."""
    for option, package in (("metrics.tensorboard", "tensorboard"), ("--wandb", "wandb")):
        wanted = config.metrics.tensorboard if package == "tensorboard" else config.metrics.wandb
        found = importlib.util.find_spec(package) if wanted else None
        if wanted and (found is None or found.origin is None):
            raise ValueError(f"{option} needs the package {package}: pip install 'moe-dualpipe[{package}]'")


class TensorBoard:
    """The numbers of each record as scalars. TensorBoard ignores those of older files after `first_step`."""

    def __init__(self, folder: Path, first_step: int):
        self._folder = str(folder / "tensorboard")
        self._writer = self._open(first_step + 1)

    def log(self, record: dict[str, Any]) -> None:
        writer, self._writer = self._writer or self._open(record["step"]), None  # one that has failed, fails always
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                writer.add_scalar(name, value, record["step"])
        self._writer = writer

    def close(self) -> None:
        if self._writer:
            self._writer.close()

    def _open(self, step: int) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(self._folder, purge_step=step)


class WandbRun:
    """A run in the W&B project `config.metrics.wandb`, with the files of W&B in `folder`.

    The id of the W&B run is stored in the folder, so that a resumed run continues the same curves. Raises ValueError
    if W&B cannot start, for example without an API key.
    """

    def __init__(self, config: TrainConfig, folder: Path):
        project, id_file = config.metrics.wandb, folder / ID_FILE
        try:
            import wandb  # type: ignore[import-not-found]

            self._run: Any = wandb.init(
                project=project, name=folder.name, dir=str(folder), config=dataclasses.asdict(config),
                id=id_file.read_text().strip() if id_file.exists() else None, resume="allow",
            )  # fmt: skip
            self._run.define_metric("*", step_metric="step")  # a resumed run may repeat steps; W&B's own must grow
            id_file.write_text(f"{self._run.id}\n")
        except Exception as error:
            reason = describe(error).rstrip(".") or type(error).__name__
            advice = "use `wandb login`, or set WANDB_MODE=offline and upload later with `wandb sync`"
            raise ValueError(f"--wandb {project} cannot start: {reason}; {advice}") from None

    def log(self, record: dict[str, Any]) -> None:
        self._run.log(record)

    def close(self) -> None:
        """Send the remaining records. A run that ends with an exception is marked as failed."""
        self._run.finish(exit_code=int(sys.exc_info()[0] is not None))
