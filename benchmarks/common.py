"""What several benchmarks share: cases that take turns, tables, and the options of a small run."""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from moe_dualpipe.models import PRESETS
from moe_dualpipe.schedule import default_micro_batches
from moe_dualpipe.training import config as training

Case = TypeVar("Case")
Result = TypeVar("Result")


def take_turns(rounds: int, cases: dict[Case, Callable[[], Result]], warm_up: int = 0) -> dict[Case, list[Result]]:
    """Run each case once per round. Returns the results of each case by round, without those of the warm-up rounds."""
    results: dict[Case, list[Result]] = {name: [] for name in cases}
    for i in range(warm_up + rounds):
        for name, case in cases.items():
            result = case()
            if i >= warm_up:
                results[name].append(result)
    return results


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """The ratio of each round."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def quartiles(values: list[float], form: str) -> tuple[str, str]:
    """Format the median, and the range from the first quartile to the third: ("5", "4 to 7")."""
    low, middle, high = statistics.quantiles(values, method="inclusive")
    return f"{middle:{form}}", f"{low:{form}} to {high:{form}}"


def full_range(values: Sequence[float], form: str = ".2f") -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


def table(columns: str, rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table. columns: their names, separated by " | "."""
    rule = f"|{'---|' * (columns.count(' | ') + 1)}"
    return "\n".join([f"| {columns} |", rule, *(f"| {' | '.join(cells)} |" for cells in rows)])


def run_options(ranks: int, parallel: training.ParallelConfig, out: str, preset: str = "tiny") -> training.TrainConfig:
    """The options of a training run on CPUs in the folder `out`, with at least two layers per pipeline rank."""
    model = PRESETS[preset]
    return training.TrainConfig(
        model=dataclasses.replace(model, num_layers=max(model.num_layers, 2 * ranks)), parallel=parallel,
        batch=training.BatchConfig(batch_size=2 * default_micro_batches(ranks), micro_batch_size=2),
        compute=training.ComputeConfig(device="cpu"), checkpoint=training.CheckpointConfig(out=out),
        health=training.HealthConfig(timeout=60.0),
    )  # fmt: skip


def new_adamw(parameters: Iterable[Tensor], optim: training.OptimizerConfig) -> torch.optim.AdamW:
    """torch's fused AdamW, with weight decay of matrices only."""
    matrices, vectors = [], []
    for parameter in parameters:
        (matrices if parameter.ndim > 1 else vectors).append(parameter)
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=optim.peak, betas=(optim.beta1, optim.beta2), fused=True)
