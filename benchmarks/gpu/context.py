"""What each section of the GPU suite receives: the device, the options, its deadline and the results so far.

Time on a rented GPU can end at any moment. Therefore results are written after each measurement, each section has a
deadline, and work that no longer fits is skipped and reported as skipped.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .measure import Clock


@dataclass(slots=True)
class Context:
    """Options and results of one run. `results` becomes results.json; a section fills its record and calls `save`."""

    device: torch.device
    smoke: bool
    out: Path
    implementations: tuple[str, ...]
    tuning_shapes: int
    training_seconds: float
    deadline: float
    now: Callable[[], float] = time.monotonic
    results: dict[str, Any] = field(default_factory=dict)

    @property
    def clock(self) -> Clock:
        return Clock(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """bf16 on a GPU. fp32 in smoke mode, because Triton's interpreter computes bf16 incorrectly."""
        return torch.float32 if self.smoke else torch.bfloat16

    @property
    def rounds_and_repeats(self) -> tuple[int, int]:
        """The last two arguments of `time_interleaved`."""
        return (1, 1) if self.smoke else (3, 7)

    def seconds_left(self) -> float:
        """Seconds until the deadline of this section."""
        return self.deadline - self.now()

    def log(self, text: str) -> None:
        print(text, flush=True)

    def save(self) -> None:
        """Write results.json atomically."""
        path = self.out / "results.json"
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(self.results, indent=1) + "\n")
        os.replace(temporary, path)
