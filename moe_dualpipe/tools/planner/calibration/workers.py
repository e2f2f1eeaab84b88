"""Measure in several processes at the same time, one for each core or GPU.

Processes are started as new programs with one thread each, as `torchrun` starts them. They meet through a file.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from ....messages import printable

_START = (
    "import sys; sys.path[:] = {path!r}; from moe_dualpipe.tools.planner.calibration.workers import work; work({rank})"
)
MEETING = 120.0
"""Seconds that processes wait for each other."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. processes: at the same time. widths, numbers: sizes, see kernels.py. seconds: spent on each
    measurement, at least. message: bytes between two processes."""

    device: Literal["cpu", "cuda"]
    processes: int
    widths: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    numbers: int = 2**24
    seconds: float = 0.2
    message: int = 2**24


def measure(plan: Plan) -> list[dict[str, Any]]:
    """Return what each process measured: the fields of `kernels.Measured`, and "link", those of `links.Measured`.

    Raises ValueError if a process fails, with the last line that it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "plan.json").write_text(json.dumps(asdict(plan)))
        processes = [_start(rank, folder) for rank in range(plan.processes)]
        try:
            _await(processes, Path(folder))
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(plan.processes)]


def _start(rank: int, folder: str) -> subprocess.Popen[bytes]:
    start = _START.format(path=[path or os.getcwd() for path in sys.path], rank=rank)
    with (Path(folder) / f"{rank}.err").open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-c", start], env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
        )  # fmt: skip


def _await(processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    while any(process.poll() is None for process in processes):
        for rank, process in enumerate(processes):
            if process.poll() not in (None, 0):
                raise _failure(rank, process, folder)
        time.sleep(0.02)
    for rank, process in enumerate(processes):
        if process.returncode:
            raise _failure(rank, process, folder)


def _failure(rank: int, process: subprocess.Popen[bytes], folder: Path) -> ValueError:
    lines = (folder / f"{rank}.err").read_text(errors="replace").strip().splitlines()
    reason = lines[-1] if lines else f"it ended with code {process.returncode}"
    return ValueError(f"measuring process {rank} failed: {printable(reason)}")


def work(rank: int) -> None:
    """Measure as rank `rank` of the plan in this folder, and write the result to a file."""
    import torch
    import torch.distributed as dist

    from . import kernels, links

    read = json.loads(Path("plan.json").read_text())
    plan = Plan(**{**read, "widths": tuple(read["widths"])})
    device = torch.device("cpu") if plan.device == "cpu" else torch.device("cuda", rank)
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", init_method=f"file://{os.getcwd()}/meeting",
        rank=rank, world_size=plan.processes, timeout=timedelta(seconds=MEETING),
    )  # fmt: skip
    watch = kernels.Stopwatch(device, plan.seconds, lambda: dist.all_reduce(torch.zeros(1)))  # gloo, also with GPUs
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    measured = asdict(kernels.measure_kernels(watch, dtype, plan.widths, plan.numbers))
    link = links.measure_link(rank, device, plan.message) if plan.processes > 1 else None
    measured["link"] = asdict(link) if link else None
    Path(f"{rank}.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()
