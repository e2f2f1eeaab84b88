"""What every section of the GPU suite is given: the device, its share of the time, and where results go.

A lease on a GPU ends when it ends. So results are written after each line of a table, each section has a deadline, and
what no longer fits is skipped by name rather than begun.
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
    """`results` is the whole of results.json; a section fills its own part of it and calls `save`."""

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
        """bf16; fp32 in Triton's interpreter, which computes bf16 wrongly."""
        return torch.float32 if self.smoke else torch.bfloat16

    @property
    def rounds_and_repeats(self) -> tuple[int, int]:
        """Rounds, and repeats in a turn."""
        return (1, 1) if self.smoke else (3, 7)

    def seconds_left(self) -> float:
        """Seconds until this section's deadline."""
        return self.deadline - self.now()

    def log(self, text: str) -> None:
        print(text, flush=True)

    def save(self) -> None:
        """Write results.json; a reader never sees half of it."""
        path = self.out / "results.json"
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(self.results, indent=1) + "\n")
        os.replace(fresh, path)
