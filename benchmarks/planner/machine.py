"""Predicted and measured step times of train.py on the CPUs of this machine.

One core is calibrated. Then train.py runs a few steps with each number of pipeline ranks, and the median counts.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.common import table
from moe_dualpipe.tools.planner.calibration import calibrate
from moe_dualpipe.tools.planner.device import Device, parse_device
from moe_dualpipe.tools.planner.prediction import estimate
from moe_dualpipe.tools.planner.published_shapes import read_shape
from moe_dualpipe.tools.planner.workload import Workload, layout_of

ROOT = Path(__file__).parents[2]
MICRO_BATCHES, MICRO_BATCH, SEQ, STEPS, WARM_UP = 8, 2, 256, 12, 4


def compare_machine(ranks: tuple[int, ...] = (1, 2, 4), preset: str = "tiny") -> str:
    """A table of predicted and measured seconds of a step."""
    rows = []
    device = parse_device(calibrate("machine", torch.device("cpu"), len(os.sched_getaffinity(0))))
    for pp in ranks:
        predicted, measured = predict_step(pp, preset, device), measure_steps(pp, preset)
        middle = statistics.median(measured)
        rows.append((str(pp), f"{predicted:.3f}", f"{middle:.3f}", f"{min(measured):.3f} to {max(measured):.3f}",
                     f"{100 * (predicted / middle - 1):+.1f}"))  # fmt: skip
    return table("pipeline ranks | predicted s | measured s | range of steps | error, %", rows)


def predict_step(pp: int, preset: str, device: Device) -> float:
    """Seconds of a step, with the constant of all published runs. Processes that share a core take turns."""
    load = Workload(
        read_shape(preset), device, layout_of(pp, pp=pp), SEQ, MICRO_BATCH, MICRO_BATCH * MICRO_BATCHES, "fp32",
        schedule="1f1b", overlap=False,
    )  # fmt: skip
    return estimate(load).seconds * max(1.0, pp / len(os.sched_getaffinity(0)))


def measure_steps(pp: int, preset: str) -> list[float]:
    """Seconds of each step of a run, without the first ones."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "--preset", preset, "--pp", pp, "--schedule", "1f1b", "--batch-size", MICRO_BATCHES * MICRO_BATCH,
            "--micro-batch-size", MICRO_BATCH, "--seq-len", SEQ, "--steps", STEPS, "--save-every", 0,
            "--eval-every", 0, "--out", f"{folder}/run", "--device", "cpu", "--dtype", "float32",
            "--set", "parallel.overlap=false",
        ]  # fmt: skip
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(pp)]
        command = [*start, str(ROOT / "train.py"), *map(str, words)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        lines = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
    tokens = MICRO_BATCHES * MICRO_BATCH * SEQ
    return [tokens / record["tokens_per_s"] for record in map(json.loads, lines) if "tokens_per_s" in record][WARM_UP:]
