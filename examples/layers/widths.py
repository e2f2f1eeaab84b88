"""Experts of different widths (arXiv 2408.10681). An expert's width depends on its id and on options.

    python examples/layers/widths.py
    python train.py --steps 40 --experts examples/layers/widths.py:WideOrNarrow \\
        --set model.expert_options.widths=32,512

The constructor receives `expert_id`, the global id of the expert, so the model has the same experts on any number of
ranks. It receives the options because its parameter `options` is annotated with a dataclass.
"""

import sys
from dataclasses import dataclass

from torch import nn

from moe_dualpipe.commands.train import main
from moe_dualpipe.models import ModelConfig


@dataclass
class Widths:
    widths: tuple[int, ...] = (64, 128, 256)
    """Inner widths. Expert e has the width at position e % len(widths)."""


class WideOrNarrow(nn.Sequential):
    """One expert."""

    def __init__(self, config: ModelConfig, expert_id: int, options: Widths):
        width = options.widths[expert_id % len(options.widths)]
        super().__init__(nn.Linear(config.hidden_size, width), nn.SiLU(), nn.Linear(width, config.hidden_size))


if __name__ == "__main__":
    options = ["--steps", "40", "--seq-len", "128", "--batch-size", "8"]
    main(["--experts", f"{__file__}:WideOrNarrow", *options, *sys.argv[1:]])
