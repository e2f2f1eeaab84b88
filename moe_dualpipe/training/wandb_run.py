"""`--wandb PROJECT`: send the metrics of a run to Weights & Biases.

The id of the W&B run is stored in the folder of the run, so that a resumed run continues the same curves.
"""

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import Any

from ..messages import describe
from .config import TrainConfig

ID_FILE = "wandb-id"


def check_wandb() -> None:
    """Raise ValueError if W&B is not installed. A folder that W&B has written, named wandb, is not the package."""
    found = importlib.util.find_spec("wandb")
    if found is None or found.origin is None:
        raise ValueError("--wandb needs W&B: pip install 'moe-dualpipe[wandb]'")


class WandbRun:
    """A sink (sinks.py): a run in the W&B project `config.metrics.wandb`, with the files of W&B in `folder`.

    Raises ValueError if W&B cannot start, for example without an API key.
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
