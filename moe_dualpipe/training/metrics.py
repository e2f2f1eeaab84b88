"""The metrics of a run: a file with one JSON object per line, TensorBoard and other sinks, and a progress bar."""

import importlib.util
import json
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..data import strict_json
from ..messages import quoted
from ..models import ModelConfig
from ..tools.drawing.curves import PANELS
from ..tools.planner.flops import peak_flops, train_flops_per_token
from .appended_file import AppendedFile
from .sinks import GuardedSink, Sink

FILE = "metrics.jsonl"
_NUMBERS = {*(panel.key for panel in PANELS), "validation_loss", "tokens", "seconds"}


class Metrics:
    """Appends records to `<run>/metrics.jsonl`. tensorboard: also writes them to `<run>/tensorboard/`.

    run: None writes no files. sinks: also get the records (sinks.py). enabled: True on one rank; the others write
    nothing. first_step: removes the records of later steps, which a resumed run repeats. If a file cannot be written,
    training continues, and later calls try again (appended_file.py).
    """

    def __init__(
        self, run: Path | None, enabled: bool, first_step: int = 0, tensorboard: bool = False,
        sinks: Sequence[Sink] = (),
    ):  # fmt: skip
        self._file = self._board = None
        self._sinks = [GuardedSink(sink) for sink in sinks] if enabled else []
        if run is None:
            return
        if enabled:
            path = run / FILE
            self._file = AppendedFile(path, lambda: _remove_later(path, first_step))
        if enabled and tensorboard:
            from .event_file import EventFile

            self._board = EventFile(run / "tensorboard", first_step + 1)

    def write(self, **record: Any) -> None:
        """Append a record, with the key `step`."""
        if self._file is not None:
            self._file.append((strict_json.write(record) + "\n").encode())  # NaN as null
        if self._board is not None:
            self._board.write(**record)
        for sink in self._sinks:
            sink.log(record)

    def close(self) -> None:
        for file in (self._file, self._board, *self._sinks):
            if file is not None:
                file.close()


def _remove_later(path: Path, step: int) -> None:
    """Remove the records of steps after `step`, and part of a line that a killed process left."""
    if not path.exists():
        return
    kept = "".join(line for line in _lines(path) if strict_json.parse(line, allow_nan=True)["step"] <= step).encode()
    if path.stat().st_size != len(kept):
        fresh = path.with_suffix(".new")
        try:
            fresh.write_bytes(kept)
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)


def check_tensorboard() -> None:
    """Raise ValueError if TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError("--tensorboard needs TensorBoard: pip install 'moe-dualpipe[tensorboard]'")


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
            records.append(_checked(strict_json.finite(strict_json.parse(line, allow_nan=True))))
        except ValueError as error:
            problem = "not a record with a step" if isinstance(error, json.JSONDecodeError) else error
            raise ValueError(f"{path}, line {number}: {problem}: {quoted(line.strip(), 60)}") from None
    return records


def _checked(record: Any) -> dict[str, Any]:
    if not isinstance(record, dict) or type(record.get("step")) is not int or not 0 <= record["step"] < 2**53:
        raise ValueError("not a record with a step")
    for key in _NUMBERS & {*record}:
        if record[key] is not None and type(record[key]) not in (int, float):
            raise ValueError(f"{key} is not a number")
    for key in ("tokens", "seconds", "tokens_per_s") if "loss" in record else ():
        if record.get(key) is None or not 0 <= record[key] < 1e15:
            raise ValueError(f"a step without valid {key}")
    return record


def _lines(path: Path) -> list[str]:
    """The complete lines of a file: a process that was killed may have left part of a line."""
    if not path.exists():
        return []
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: {error.reason} at byte {error.start}") from None


def progress_bar(steps: int, first: int, enabled: bool) -> tqdm:
    """Shows loss, tokens/s and time left; updates less often if stderr is not a terminal."""
    interval = 0.2 if sys.stderr.isatty() else 5.0
    return tqdm(
        total=steps, initial=first, disable=not enabled, mininterval=interval, unit="step", dynamic_ncols=True,
        bar_format="{desc}{percentage:3.0f}%|{bar}| step {n}/{total} [{elapsed} < {remaining}{postfix}]",
    )  # fmt: skip


def load_statistics(load_LE: Tensor) -> dict[str, float]:
    """The maximum load of an expert over the mean, in the worst layer, and the fraction of experts without a token.

    load_LE: tokens per layer and expert. Example: [[4, 0, 2, 2]] has a mean of 2, so these are 2.0 and 0.25.
    """
    if not load_LE.sum():
        return {}
    mean_L = load_LE.float().mean(1).clamp(min=1e-9)
    return {
        "expert_load_max_over_mean": round((load_LE.max(1).values / mean_L).max().item(), 3),
        "dead_experts": round((load_LE == 0).float().mean().item(), 4),
    }


def utilisation(
    model: ModelConfig, seq_len: int, device: torch.device, dtype: torch.dtype, num_devices: int,
    peak_tflops: float | None = None,
) -> float | None:  # fmt: skip
    """Model FLOPs utilization (MFU) = this factor x tokens/s of all devices. None if the peak of a device is unknown.

    the planner counts the FLOPs. peak_tflops: of one device; None: known for common GPUs. On CPUs, each process
    counts as a device.
    """
    peak = peak_tflops * 1e12 if peak_tflops else None
    if peak is None and device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(device), dtype)
    return train_flops_per_token(model, seq_len) / (peak * num_devices) if peak else None


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory of this process in MiB: on its GPU, or resident main memory, including torch itself."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / (2**20 if sys.platform == "darwin" else 2**10)
