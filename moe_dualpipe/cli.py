"""The console script `moe-dualpipe`: show schedules, measure the overlap, and use trained models.

    moe-dualpipe schedule show dualpipe --ranks 8 --micro-batches 20 --out dualpipe.svg
    moe-dualpipe schedule compare --stages 8 --micro-batches 32 --cost.F 2 --cost.B 5 --cost.W 2 --cost.FB 6
    moe-dualpipe schedule check order.csv
    moe-dualpipe profile analyze trace.json.gz --phases --out lanes.png
    moe-dualpipe profile run --mode train --preset tiny
    moe-dualpipe plot runs/tiny
    moe-dualpipe data prepare notes.jsonl --out corpus
    moe-dualpipe generate runs/tiny --prompt "def "
    moe-dualpipe model show deepseek-v3 --pp 16 --ep 64

Invalid options print one line and exit with code 2. An invalid schedule exits with code 1.
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
from .messages import describe
from .option_errors import one_line_errors
from .schedule import ScheduleError

COMMANDS = {
    "schedule": ScheduleCommands, "profile": ProfileCommands, "data": DataCommands, "plot": Plot, "generate": Generate,
    "export": Export, "model": ModelCommands,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    try:
        with one_line_errors():
            chosen: Any = tyro.extras.subcommand_cli_from_dict(
                COMMANDS, args=arguments, prog="moe-dualpipe", config=(OmitSubcommandPrefixes,)
            )
        getattr(chosen, "command", chosen).run()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ScheduleError as error:
        print(error, file=sys.stderr)
        return 1
    except OverflowError as error:
        print(f"moe-dualpipe: error: the costs are too small or too large: {error}", file=sys.stderr)
        return 2
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("RANK", "0") == "0":  # print once, not on every process of torchrun
            print(f"moe-dualpipe: error: {describe(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
