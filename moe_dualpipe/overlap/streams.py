"""The streams of a device. All code that uses streams asks here, so tests can simulate them on a CPU."""

from typing import Any

import torch


def streams_of(device: torch.device) -> Any | None:
    """The module with `Stream`, `stream` and `current_stream` for `device`. None if operators end when they return."""
    return torch.cuda if device.type == "cuda" else None
