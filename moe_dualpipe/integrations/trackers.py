"""TensorBoard and Weights & Biases (W&B): each gets the records of a run in a method `log(dict)`."""

import importlib.util
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..messages import describe

ID_FILE = "wandb-id"


def check_installed(option: str, package: str) -> None:
    """Raise ValueError if a package is missing. A folder that W&B has written, named wandb, is not the package."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ValueError(f"{option} needs the package {package}: pip install 'moe-dualpipe[{package}]'")


class TensorBoard:
    """The numbers of each record as scalars. TensorBoard ignores those of older files after `first_step`."""

    def __init__(self, folder: Path, first_step: int):
        self._folder = str(folder / "tensorboard")
        self._writer = self._open(first_step + 1)

    def log(self, record: dict[str, Any]) -> None:
        writer, self._writer = self._writer or self._open(record["step"]), None  # after a failure, open another
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
    """A run in the W&B project `project`, with the files of W&B in `folder`. options: of the run, to show.

    The id of the W&B run is stored in the folder, so that a resumed run continues the same curves. Raises ValueError
    if W&B cannot start, for example without an API key.
    """

    def __init__(self, project: str, options: Mapping[str, Any], folder: Path):
        id_file = folder / ID_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            import wandb  # type: ignore[import-not-found]

            self._run: Any = wandb.init(
                project=project, name=folder.name, dir=str(folder), config=dict(options),
                id=id_file.read_text().strip() if id_file.exists() else None, resume="allow",
            )  # fmt: skip
            self._run.define_metric("*", step_metric="step")  # a resumed run may repeat steps; W&B's own must grow
            id_file.write_text(f"{self._run.id}\n")
        except Exception as error:
            reason = describe(error).rstrip(".") or type(error).__name__
            login = "" if "wandb login" in reason else "use `wandb login`, "
            advice = f"{login}or set WANDB_MODE=offline and upload later with `wandb sync`"
            with suppress(OSError):  # W&B may have written why
                folder.rmdir()
            raise ValueError(f"--wandb {project} cannot start: {reason}; {advice}") from None

    def log(self, record: dict[str, Any]) -> None:
        self._run.log(record)

    def close(self) -> None:
        """Send the remaining records. A run that ends with an exception is marked as failed."""
        self._run.finish(exit_code=int(sys.exc_info()[0] is not None))
