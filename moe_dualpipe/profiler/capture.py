"""Record what this process does as a Chrome trace, so that `analyze` finds everything it needs in it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile


@contextmanager
def capture(path: Path, device: torch.device) -> Iterator[None]:
    """What happens inside goes to `path` (.json or .json.gz), with its work on `device`, until that is done.

    On a CPU all threads are recorded: a modelled link's time passes on one of its own.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch's profiler says on stderr when it starts and stops
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    threads = _ExperimentalConfig(profile_all_threads=device.type == "cpu")
    with profile(activities=activities, experimental_config=threads) as profiler:
        yield
        synchronize(device)
    profiler.export_chrome_trace(str(path))


def synchronize(device: torch.device) -> None:
    """Wait until everything queued on `device` is done; a CPU queues nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
