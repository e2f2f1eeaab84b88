"""The command train.py, which `moe-dualpipe train` runs as well; and `moe_dualpipe.train`, the same from Python.

Signals are handled first: importing torch takes seconds. Here the tools meet the app: a run gets the
finder of a first non-finite tensor, the profiler of `--profile`, and the planner's prediction of its step.
"""

import io
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..health.report import exit_on_invalid_option
from ..health.signals import Stop

if TYPE_CHECKING:
    from ..training import TrainConfig, Trainer
    from ..training.resolve import Instruments


def main(arguments: Sequence[str] | None = None) -> None:
    """Run train.py. Invalid options print one line and exit with code 2. Main thread only."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names and text may have characters that a terminal lacks
    with Stop().on_signals() as stop:
        from ..runtime.launch import Launch
        from ..training.options import parse
        from ..training.run import run

        with exit_on_invalid_option(True, ValueError):
            launch = Launch.from_environment()
        stop.announce = launch.rank == 0
        with exit_on_invalid_option(launch.local_rank == 0, ValueError, OSError):
            request = parse(sys.argv[1:] if arguments is None else arguments, quiet=launch.local_rank > 0)
        run(request, launch, stop, instruments())


def train(config: "TrainConfig | None" = None, *arguments: Any, **options: Any) -> "Trainer":
    """Train from Python, as train.py does: see `moe_dualpipe.training.train`, which takes the same arguments."""
    from ..training.run import train as start

    return start(config, *arguments, **{"instruments": instruments(), **options})


def instruments() -> "Instruments":
    """What the tools add to a run."""
    from ..tools.checks.nonfinite import first_nonfinite
    from ..tools.planner.stages import predict_run
    from ..tools.profiler.profiled_steps import profiled_steps
    from ..training.resolve import Instruments

    return Instruments(first_nonfinite, (profiled_steps,), predict_run)
