"""`moe-dualpipe check`: compare parallel runs with one process, and check layers and machines."""

from dataclasses import dataclass
from typing import Annotated

import tyro
from tyro.conf import Positional, arg, subcommand

from .check_cluster import CheckCluster
from .check_layers import CheckAttention, CheckBlock, CheckExperts, CheckRouter

_PARALLEL = """Run a model in many parallel layouts on this machine, and compare each with one process.

Takes the options of train.py. Uses the model, the seed, the sequence length, the micro-batch size and the layout, with
--pp x --ep processes (--pp 1 by default). Ignores data, optimizer and checkpoints."""


@dataclass(frozen=True)
class CheckParallel:
    """Check that losses, logits and gradients are the same in any parallel layout. Takes the options of train.py."""

    options: Positional[Annotated[tuple[str, ...], arg(metavar="[OPTION ...]")]] = ()
    """Options of train.py; --help lists them."""

    def run(self) -> int:
        """Print the table. Returns the exit code: 1 if a check failed. Raises ValueError for invalid options."""
        from ..training.config import BatchConfig, TrainConfig
        from ..training.options import parse_arguments

        defaults = TrainConfig(batch=BatchConfig(seq_len=16))
        config = parse_arguments(self.options, defaults)

        from ..tools.checks import check_parallel  # imports torch

        report = check_parallel(config)
        print(report)
        return 0 if report.passed else 1


@dataclass(frozen=True)
class CheckCommands:
    """Check your own layer against its contract, parallel runs against one process, or the machines of a run."""

    command: Annotated[
        Annotated[CheckParallel, subcommand("parallel")]
        | Annotated[CheckCluster, subcommand("cluster")]
        | Annotated[CheckExperts, subcommand("experts")]
        | Annotated[CheckRouter, subcommand("router")]
        | Annotated[CheckAttention, subcommand("attention")]
        | Annotated[CheckBlock, subcommand("block")],
        tyro.conf.arg(name=""),
    ]
