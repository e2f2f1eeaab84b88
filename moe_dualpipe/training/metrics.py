"""The metrics of a run: a file with one JSON object per line, and the sinks that get the same records.

A sink is any object with a method `log(dict)`. TensorBoard (`metrics.tensorboard`) and Weights & Biases (`--wandb`) are
two of them. An error while logging does not end the run: it is printed once, as a warning.
"""

import errno
import math
import os
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from ..data import strict_json
from ..data.files import replace_file
from ..errors import describe_user_error
from ..health.report import warn
from ..integrations.trackers import TensorBoard, WandbRun
from ..messages import plural, quoted
from ..models import ModelConfig
from ..models.costs import train_flops_per_token
from .config import TrainConfig

FILE = "metrics.jsonl"
FIELDS = {
    "step": "Number of the step, counted from 1.",
    "loss": "Mean cross-entropy per token of the step.",
    "validation_loss": "Mean cross-entropy per token of held-out text, before and after the run and between.",
    "grad_norm": "Norm of the gradient of the whole model, before clipping.",
    "lr": "Learning rate.",
    "seconds": "Duration of the step.",
    "tokens": "Tokens of all ranks, with padding and ignored labels: a step computes them, too.",
    "tokens_per_s": "Tokens per second of all ranks.",
    "mfu": "Model FLOPs utilization: model FLOPs over the peak of all devices. Only if the peak of a device is known.",
    "peak_memory_mb": "Peak memory of the first rank so far, in MiB. The end of the run prints the maximum over ranks.",
    "reduce_seconds": "Duration of the sums of gradients over replicas, on the first rank. Only with replicas.",
    "reduce_exposed_seconds": "The part of reduce_seconds in which the rank only waited.",
    "gather_seconds": "Duration of the transfers of new weights after the previous step. Only with replicas.",
    "gather_exposed_seconds": "The part of gather_seconds in which the rank only waited.",
    "mb_between_machines": "Megabytes that dispatch and combine sent between machines, over all ranks. Absent if none.",
    "expert_load_max_over_mean": "Largest number of tokens of an expert over the mean, in the worst layer.",
    "max_vio": "Largest load of an expert over the mean, minus 1, averaged over layers (arXiv 2408.15664).",
    "dead_experts": "Fraction of experts without a token in the step.",
    "starved_experts": "Number of experts with less than 1% of the mean load of their layer in the step.",
    "rank_load_max_over_mean": "Largest load of a rank of an expert group over the mean. Only if experts move.",
    "moved_experts": "Experts that changed rank after this step.",
    "rank_load_before": "Largest load of a rank over the mean, in the steps before experts moved.",
    "rank_load_after": "What this load would have been with the new places.",
    "skipped": "Steps skipped so far because the loss or gradient was not finite.",
    "mtp_loss": "Mean loss of multi-token prediction, without its factor.",
    "sequence_loss": "Mean sequence-wise loss of routers, without its factor.",
    "z_loss": "Mean z-loss of routers, without its factor.",
    "save_error": "The rank and the reason, if a checkpoint could not be saved.",
}
"""The fields of a record, and what they mean. A field that does not apply is absent."""
SUMS = (
    "seconds", "tokens", "reduce_seconds", "reduce_exposed_seconds", "gather_seconds", "gather_exposed_seconds",
    "moved_experts",
)  # fmt: skip
RATES = ("tokens_per_s", "mfu")
LATEST = ("step", "lr", "skipped", "peak_memory_mb")


class Sink(Protocol):
    """Receives the records of a run, on its first rank. An optional method `close()` is called at the end."""

    def log(self, record: dict[str, Any]) -> object:
        """Receive a copy of a record: the step and the metrics, as in metrics.jsonl, but with NaN instead of null."""
        ...


def chosen_sinks(config: TrainConfig, folder: Path, first_step: int) -> list[Sink]:
    """The sinks that the options choose. Raises ValueError for one that cannot start."""
    metrics, options = config.metrics, asdict(config)
    wandb = [WandbRun(metrics.wandb, options, folder)] if metrics.wandb else []  # first: it may be refused
    return [*wandb, *([TensorBoard(folder, first_step)] if metrics.tensorboard else [])]


class Metrics:
    """Appends records to `<run>/metrics.jsonl`, and passes them on.

    run: None writes no file. sinks: also get the records; their errors do not end the run. first_step:
    removes the records of later steps, which a resumed run repeats. Records that cannot be written wait in memory, and
    later calls try again; a failed write never ends the run. A folder that is removed during the run is created again.
    """

    def __init__(self, run: Path | None, first_step: int = 0, sinks: Sequence[Sink] = ()):
        self._sinks, self._path, self._first_step = sinks, run and run / FILE, first_step
        self._failed: list[Sink] = []
        self._waiting: list[bytes] = []
        self._prepared = self._warned = False
        self._append()

    def write(self, **record: Any) -> None:
        """Append a record, with the key `step`."""
        self._append((strict_json.write(record) + "\n").encode())  # NaN as null
        for sink in self._sinks:
            self._tell(sink, "log", dict(record))

    def close(self) -> None:
        """Try one last time to write the waiting records, and warn if that fails."""
        self._append()
        if self._path and (self._waiting or not self._prepared):
            warn(f"{self._path} lacks the last {plural(len(self._waiting), 'record')}")
        for sink in self._sinks:
            self._tell(sink, "close")

    def _tell(self, sink: Sink, method: str, *arguments: object) -> None:
        """Call a method of a sink, if it has it. Its first error is printed; none is raised."""
        try:
            getattr(sink, method, lambda *_: None)(*arguments)
        except Exception as error:
            if sink not in self._failed:
                self._failed.append(sink)
                what = f"{type(sink).__name__} cannot {method}: {describe_user_error(error)}"
                warn(f"{what}; the run continues, and does not repeat this warning")

    def _append(self, *records: bytes) -> None:
        """Write the waiting records, then these. After a failure, warn once."""
        if self._path is None:
            return
        self._waiting += records
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not self._prepared:
                _remove_later(self._path, self._first_step)
                self._prepared = True
            if self._waiting:
                _append_all(self._path, b"".join(self._waiting))
            self._waiting = []
        except OSError as error:
            if not self._warned:
                warn(f"{self._path} cannot be written: {error.strerror or error}; the run continues and tries again")
            self._warned = True


def _append_all(path: Path, records: bytes) -> None:
    """Write all of `records` or nothing. The file is closed: a network disk may report an error only then."""
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        if file.write(records) != len(records):
            with suppress(OSError):
                file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def merged(records: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the record of an interval from those of its steps.

    Seconds and tokens are sums. Rates are those of the whole interval. The step, the learning rate, the number of
    skipped steps and the peak memory are those of the last step. All other values, such as the loss, are means of the
    finite values, or NaN if none is finite.

    Example: losses [3, NaN, 1] and seconds [1, 1, 2] give a loss of 2 and 4 seconds.
    """
    if len(records) == 1:
        return records[0]
    return {key: _merge(key, records) for key in dict.fromkeys(key for record in records for key in record)}


def _merge(key: str, records: Sequence[dict[str, float]]) -> float:
    values = [record[key] for record in records if key in record]
    if key in LATEST:
        return values[-1]
    if key in SUMS:
        return round(sum(values), 4)
    if key in RATES:
        weighted = [(record[key] * record["seconds"], record["seconds"]) for record in records if key in record]
        amounts, seconds = (sum(column) for column in zip(*weighted, strict=True))
        return round(amounts / max(seconds, 1e-9), 4)
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _remove_later(path: Path, step: int) -> None:
    """Remove the records of steps after `step`, and part of a line that a killed process left."""
    if not path.exists():
        return
    kept = "".join(line for line in _lines(path) if strict_json.parse(line, allow_nan=True)["step"] <= step).encode()
    if path.stat().st_size != len(kept):
        replace_file(path, kept)


def read_records(run: Path) -> list[dict[str, Any]]:
    """The records of the run in this folder. Raises ValueError if there are none or a line is invalid.

    A number that was not finite is None. In files of older runs, it is NaN or Infinity.
    """
    path = run / FILE
    if not path.is_file():
        raise ValueError(f"{run} is not the folder of a run: it has no metrics.jsonl")
    records = []
    for number, line in enumerate(_lines(path), 1):
        try:
            record = strict_json.finite(strict_json.parse(line, allow_nan=True))
        except ValueError:
            record = None
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise ValueError(f"{path}, line {number}: not a record with a step: {quoted(line.strip(), 60)}")
        records.append(record)
    return records


def _lines(path: Path) -> list[str]:
    """The complete lines of a file: a process that was killed may have left part of a line."""
    if not path.exists():
        return []
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: {error.reason} at byte {error.start}") from None


def utilization(model: ModelConfig, seq_len: int, num_devices: int, peak_flops: float | None) -> float | None:
    """Model FLOPs utilization (MFU) = this factor x tokens/s of all devices. None if the peak of a device is unknown.

    peak_flops: FLOP/s of one device. On CPUs, each process counts as a device.
    """
    return train_flops_per_token(model, seq_len) / (peak_flops * num_devices) if peak_flops else None


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory of this process in MiB: on its GPU, or resident main memory, including torch itself."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / (2**20 if sys.platform == "darwin" else 2**10)
