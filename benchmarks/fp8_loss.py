"""Does a model learn in FP8? Train it with each recipe from the same weights on the same data, and compare the losses.

    python -m benchmarks.fp8_loss                              tiny, 3 seeds, 600 steps of 1,024 tokens
    python -m benchmarks.fp8_loss --preset small --seeds 1     another size

The runs of a seed differ in nothing but the rounding. "no scales" is what the recipes avoid: rows are rounded to
e4m3 as they are, and small gradients become 0.
"""

import statistics
import sys
from dataclasses import dataclass
from typing import Any
from unittest import mock

import tyro
from torch import Tensor
from tyro.conf import OmitArgPrefixes

from benchmarks.common import full_range, table
from moe_dualpipe import training
from moe_dualpipe.kernels.fp8 import DTYPE, RECIPES, Fp8Matrix, Fp8Recipe
from moe_dualpipe.models import PRESETS

CASES: dict[str, tuple[Any, Any]] = {
    "bf16": ("off", "ue8m0"), **{name: ("experts", name) for name in RECIPES},
    "ue8m0 + dispatch": ("experts+dispatch", "ue8m0"), "no scales": ("experts", "ue8m0"),
}  # fmt: skip
"""compute.fp8 and compute.fp8_recipe."""


@dataclass(frozen=True)
class Options:
    """Compare the losses of FP8 recipes with those of bf16."""

    preset: str = "tiny"
    """Size of the model."""
    steps: int = 600
    seeds: int = 3
    batch_size: int = 8
    """Sequences per step."""
    seq_len: int = 128


class NoScales(Fp8Recipe):
    """Rounds rows without scaling."""

    def quantize_rows(self, x_RC: Tensor) -> Fp8Matrix:
        rounded = x_RC.detach().float().clamp(-448, 448).to(DTYPE)
        return Fp8Matrix(rounded, x_RC.new_ones(len(x_RC), 1).float(), 1, x_RC.shape[1])


def losses(case: str, seed: int, options: Options) -> tuple[float, float]:
    """The mean training loss of the last tenth of the steps, and the validation loss after the last."""
    fp8, recipe = CASES[case]
    config = training.TrainConfig(
        model=PRESETS[options.preset], seed=seed, steps=options.steps,
        batch=training.BatchConfig(batch_size=options.batch_size, micro_batch_size=4, seq_len=options.seq_len),
        compute=training.ComputeConfig(device="cpu", dtype="bfloat16", fp8=fp8, fp8_recipe=recipe),
        sample=training.SampleConfig(sample_tokens=0),
    )  # fmt: skip
    found = {"loss": [], "validation_loss": []}

    class Sink:
        def log(self, record: dict) -> None:
            for name, values in found.items():
                values += [record[name]] if name in record else []

    with mock.patch.dict(RECIPES, {"ue8m0": NoScales()} if case == "no scales" else {}):
        training.train(config, log=[Sink()], verbose=False)
    result = statistics.fmean(found["loss"][-options.steps // 10 :]), found["validation_loss"][-1]
    print(f"{case}, seed {seed}: {result[0]:.4f}, {result[1]:.4f}", file=sys.stderr)
    return result


def rows(options: Options) -> list[list[str]]:
    """One row per case: losses, and their relative difference from bf16 with the same seed."""
    found = {case: [losses(case, seed, options) for seed in range(options.seeds)] for case in CASES}
    lines = []
    for case, values in found.items():
        cells = [case]
        for i in range(2):
            own = [pair[i] for pair in values]
            apart = [100 * (a / b[i] - 1) for a, b in zip(own, found["bf16"], strict=True)]
            cells += [f"{statistics.fmean(own):.4f}", full_range(own, ".4f")]
            cells += ["-" if case == "bf16" else f"{statistics.fmean(apart):+.2f}% ({full_range(apart, '+.2f')})"]
        lines.append(cells)
    return lines


def main() -> None:
    options = tyro.cli(OmitArgPrefixes[Options], description=Options.__doc__)
    tokens = options.batch_size * options.seq_len
    print(f"{options.preset}, {options.seeds} seeds, {options.steps} steps of {tokens:,} tokens\n")
    columns = "experts | training loss, last tenth | seeds | against bf16 | validation loss | seeds | against bf16"
    print(table(columns, rows(options)))


if __name__ == "__main__":
    main()
