"""Record this process with torch.profiler, as a Chrome trace that `analyze` can read."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile


@contextmanager
def capture(path: Path, device: torch.device) -> Iterator[None]:
    """Record the body, with all its work on `device`, into `path` (.json or .json.gz).

    On a CPU, all threads are recorded, because a modeled link runs in a thread.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no messages on stderr at start and stop
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    threads = _ExperimentalConfig(profile_all_threads=device.type == "cpu")
    with profile(activities=activities, experimental_config=threads) as profiler:
        yield
        synchronize(device)
    profiler.export_chrome_trace(str(path))


def synchronize(device: torch.device) -> None:
    """Wait for all queued work on a CUDA device. Does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
