"""The console script `moe-dualpipe`: schedules to look at, the overlap to measure, runs to compare and to try.

    moe-dualpipe schedule show dualpipe --ranks 8 --micro-batches 20 --out dualpipe.svg
    moe-dualpipe schedule compare --stages 8 --micro-batches 32 --cost.F 2 --cost.B 5 --cost.W 2 --cost.FB 6
    moe-dualpipe schedule check order.csv
    moe-dualpipe profile analyze trace.json.gz --phases --out lanes.png
    moe-dualpipe profile run --mode train --preset tiny
    moe-dualpipe plot runs/tiny
    moe-dualpipe data prepare notes.jsonl --out corpus
    moe-dualpipe generate runs/tiny --prompt "def "
    moe-dualpipe model show deepseek-v3 --pp 16 --ep 64

A mistake in what was asked for is one line, and exit code 2; a schedule that breaks a law is exit code 1.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

import tyro
from tyro.conf import OmitSubcommandPrefixes

from .commands.data import DataCommands
from .commands.export import Export
from .commands.generate import Generate
from .commands.model import ModelCommands
from .commands.plot import Plot
from .commands.profile import ProfileCommands
from .commands.schedule import ScheduleCommands
from .schedule import ScheduleError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    chosen: Any = tyro.extras.subcommand_cli_from_dict(
        {
            "schedule": ScheduleCommands,
            "profile": ProfileCommands,
            "data": DataCommands,
            "plot": Plot,
            "generate": Generate,
            "export": Export,
            "model": ModelCommands,
        },
        args=arguments,
        prog="moe-dualpipe",
        config=(OmitSubcommandPrefixes,),
    )
    try:
        getattr(chosen, "command", chosen).run()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output, as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ScheduleError as error:
        print(error, file=sys.stderr)
        return 1
    except OverflowError as error:
        print(f"moe-dualpipe: error: costs so small or large cannot be reckoned with: {error}", file=sys.stderr)
        return 2
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("RANK", "0") == "0":  # of the processes that torchrun started, one speaks for all
            print(f"moe-dualpipe: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
