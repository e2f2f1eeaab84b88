"""Measure in several processes at the same time, one for each core or GPU, with one thread each."""

import json
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import multiprocessing

from ....messages import printable
from . import kernels, links

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
    """Return what each process measured: see kernels.py, and the "link", see links.py.

    Raises ValueError if a process fails, with the last line that it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            multiprocessing.start_processes(_work, (plan, folder), plan.processes, start_method="spawn")
        except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
            reason = printable(str(error).strip().splitlines()[-1])
            raise ValueError(f"measuring process {error.error_index} failed: {reason}") from None
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(plan.processes)]


def _work(rank: int, plan: Plan, folder: str) -> None:
    """Measure as rank `rank`, and write the result to a file."""
    cuda = plan.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    torch.set_num_threads(1)
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", init_method=f"file://{folder}/meeting", rank=rank,
        world_size=plan.processes, timeout=timedelta(seconds=MEETING),
    )  # fmt: skip
    watch = kernels.Stopwatch(device, plan.seconds, lambda: dist.all_reduce(torch.zeros(1)))  # gloo, also with GPUs
    dtype = torch.bfloat16 if cuda else torch.float32
    measured = kernels.measure_kernels(watch, dtype, plan.widths, plan.numbers)
    measured["link"] = links.measure_link(rank, device, plan.message) if plan.processes > 1 else None
    (Path(folder) / f"{rank}.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()
