"""Does a model learn in FP8? Train it with each recipe from the same weights on the same data, and compare the losses.

    python -m benchmarks.fp8_loss --figure losses.png          tiny, 3 seeds, 600 steps of 1,024 tokens
    python -m benchmarks.fp8_loss --model 30m --cases ue8m0 --seeds 1 --steps 150

The runs of a seed differ only in the rounding. "no scales" is what the recipes avoid: rows are rounded to
e4m3 as they are, and small gradients become 0.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from benchmarks.common import full_range, table
from moe_dualpipe import training
from moe_dualpipe.command_line import program_options
from moe_dualpipe.kernels.fp8 import DTYPE, RECIPES, Fp8Matrix, Fp8Recipe
from moe_dualpipe.models import PRESETS
from moe_dualpipe.tools.drawing.figures import new_figure, save_figure

CASES: dict[str, tuple[Any, Any]] = {
    "bf16": ("off", "ue8m0"), **{name: ("experts", name) for name in RECIPES},
    "ue8m0 + dispatch": ("experts+dispatch", "ue8m0"), "no scales": ("experts", "ue8m0"),
    "float32": ("off", "ue8m0"),
}  # fmt: skip
"""compute.fp8 and compute.fp8_recipe. What is not in FP8 is in bf16; with float32, all is in fp32."""
MODELS = {
    "30m": replace(
        PRESETS["tiny"], hidden_size=384, num_layers=6, num_heads=6, head_dim=64, dense_size=1536, expert_size=256,
        num_experts=16,
    ),
    **PRESETS,
}  # fmt: skip
POINTS = 24
"""Points of a curve. Each is the mean loss of several steps."""


@dataclass(frozen=True)
class Options:
    """Compare the losses of FP8 recipes with those of bf16."""

    model: str = "tiny"
    """A preset, or 30m: tiny with a width of 384, 6 blocks, and 16 experts of width 256; 29.5 M parameters."""
    cases: tuple[str, ...] = tuple(CASES)
    """What to train, beside bf16."""
    steps: int = 600
    seeds: int = 3
    batch_size: int = 8
    """Sequences per step."""
    seq_len: int = 128
    figure: Path | None = None
    """Also draw the losses of all steps, as PNG or SVG."""


@dataclass(frozen=True)
class Losses:
    """The training loss of each step, and the validation loss after the last."""

    training: list[float]
    validation: float

    @property
    def final(self) -> tuple[float, float]:
        """The mean training loss of the last tenth of the steps, and the validation loss."""
        return statistics.fmean(self.training[-max(len(self.training) // 10, 1) :]), self.validation

    def curve(self) -> list[float]:
        size = -(-len(self.training) // POINTS)
        return [statistics.fmean(self.training[i : i + size]) for i in range(0, len(self.training), size)]


class NoScales(Fp8Recipe):
    """Rounds rows without scaling."""

    def quantize_rows(self, x_RC: Tensor) -> Fp8Matrix:
        rounded = x_RC.detach().float().clamp(-448, 448).to(DTYPE)
        return Fp8Matrix(rounded, x_RC.new_ones(len(x_RC), 1).float(), 1, x_RC.shape[1])


class Records(list[dict[str, Any]]):
    """Keeps what a run logs."""

    def log(self, record: dict[str, Any]) -> None:
        self.append(record)


def train(case: str, seed: int, options: Options) -> Losses:
    (fp8, recipe), dtype = CASES[case], "float32" if case == "float32" else "bfloat16"
    config = training.TrainConfig(
        model=MODELS[options.model], seed=seed, steps=options.steps, optim=training.OptimizerConfig("adamw"),
        batch=training.BatchConfig(batch_size=options.batch_size, micro_batch_size=4, seq_len=options.seq_len),
        compute=training.ComputeConfig(device="cpu", dtype=dtype, fp8=fp8, fp8_recipe=recipe),
        sample=training.SampleConfig(sample_tokens=0),
    )  # fmt: skip
    records = Records()
    with mock.patch.dict(RECIPES, {"ue8m0": NoScales()} if case == "no scales" else {}):
        training.train(config, log=[records], verbose=False)
    validation = [record["validation_loss"] for record in records if "validation_loss" in record]
    losses = Losses([record["loss"] for record in records if "loss" in record], validation[-1])
    print(f"{case}, seed {seed}: {losses.final[0]:.4f}, {losses.final[1]:.4f}", file=sys.stderr)
    return losses


def rows(found: Mapping[str, Sequence[Losses]]) -> list[list[str]]:
    """One row per case: losses, and their relative difference from bf16 with the same seed."""
    lines = []
    for case, seeds in found.items():
        cells = [case]
        for i in range(2):
            own = [losses.final[i] for losses in seeds]
            apart = percent(own, [losses.final[i] for losses in found["bf16"]])
            cells += [f"{statistics.fmean(own):.4f}", full_range(own, ".4f")]
            cells += ["-" if case == "bf16" else f"{statistics.fmean(apart):+.2f}% ({full_range(apart, '+.2f')})"]
        lines.append(cells)
    return lines


def percent(own: Sequence[float], others: Sequence[float]) -> list[float]:
    return [100 * (a / b - 1) for a, b in zip(own, others, strict=True)]


def draw(found: Mapping[str, Sequence[Losses]], path: Path) -> None:
    """Draw the loss of bf16, and the differences of other cases from it: means over the seeds, with ranges as bands."""
    figure = new_figure(9, 3.4)
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    for case, seeds in found.items():
        curves = [losses.curve() for losses in seeds]
        if case != "bf16":
            curves = [percent(own, plain.curve()) for own, plain in zip(curves, found["bf16"], strict=True)]
        axes, points = left if case == "bf16" else right, [*zip(*curves, strict=True)]
        ends = [100 * (i + 1) / len(points) for i in range(len(points))]
        axes.plot(ends, [statistics.fmean(at) for at in points], label=case)
        axes.fill_between(ends, [*map(min, points)], [*map(max, points)], alpha=0.15)
    left.set(title="bf16", xlabel="% of the steps", ylabel="training loss, nats per byte")
    right.set(title="relative to bf16", xlabel="% of the steps", ylabel="change of the loss, %")
    right.legend(fontsize=8)
    save_figure(figure, path)


def main() -> None:
    options = program_options(Options, "benchmarks.fp8_loss")
    if unknown := {options.model} - MODELS.keys() | {*options.cases} - CASES.keys():
        sys.exit(f"{min(unknown)!r} is unknown: models are {', '.join(MODELS)}; cases are {', '.join(CASES)}")
    tokens = options.batch_size * options.seq_len
    print(f"{options.model}, {options.seeds} seeds, {options.steps} steps of {tokens:,} tokens\n")
    cases = dict.fromkeys(("bf16", *options.cases))
    found = {case: [train(case, seed, options) for seed in range(options.seeds)] for case in cases}
    columns = "experts | training loss, last tenth | seeds | against bf16 | validation loss | seeds | against bf16"
    print(table(columns, rows(found)))
    if options.figure:
        draw(found, options.figure)


if __name__ == "__main__":
    main()
