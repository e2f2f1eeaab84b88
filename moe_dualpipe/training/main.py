"""The command train.py, which `moe-dualpipe train` runs as well.

Signals are handled first. Options are read before torch is imported, which takes seconds.
"""

import sys
from collections.abc import Sequence

from ..health.signals import Stop
from ..standard_streams import protect_streams


def main(arguments: Sequence[str] | None = None) -> None:
    """Run train.py. Invalid options print one line and exit with code 2. Main thread only."""
    protect_streams("stdout", "stderr")  # first: the next file would get the number of a closed stream
    with Stop().on_signals() as stop:
        _train(sys.argv[1:] if arguments is None else arguments, stop)


def _train(arguments: Sequence[str], stop: Stop) -> None:
    from .. import __version__
    from ..data.stores import StorageError
    from ..runtime.launch import Launch
    from .command_line import exit_on_invalid_option, parse_arguments

    with exit_on_invalid_option(True, ValueError):
        launch = Launch.from_environment()
    stop.announce = launch.rank == 0
    if "--version" in arguments:
        if launch.rank == 0:
            print(f"moe-dualpipe {__version__}")
        return
    with exit_on_invalid_option(launch.local_rank == 0, ValueError, StorageError):
        config = parse_arguments(arguments, quiet=launch.local_rank > 0)

    from .from_options import run  # imports torch

    run(config, launch, arguments, stop)
