"""Parse the arguments of `moe-dualpipe`, run the chosen command, and print its errors on one line."""

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

import tyro
from tyro.conf import OmitSubcommandPrefixes

from ..errors import error_text, one_line_errors, user_error
from ..messages import describe
from ..schedule import ScheduleError
from ..standard_streams import protect_streams
from .check import CheckCommands, CheckParallel
from .data import DataCommands
from .eval import Eval
from .export import Export
from .generate import Generate
from .model import ModelCommands
from .plan import PlanCommands
from .plot import Plot
from .profile import ProfileCommands
from .schedule import ScheduleCommands
from .train import Train

COMMANDS = {
    "train": Train,
    "schedule": ScheduleCommands, "profile": ProfileCommands, "data": DataCommands, "plot": Plot, "generate": Generate,
    "eval": Eval, "export": Export, "model": ModelCommands, "plan": PlanCommands, "check": CheckCommands,
}  # fmt: skip


_DESCRIPTION = """Train Mixture-of-Experts transformers under DualPipe, and see what it hides.

$ moe-dualpipe COMMAND --help    the options of a command
$ moe-dualpipe --version
"""
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def run_command(arguments: Sequence[str]) -> int:
    """Parse and run a command; returns the exit code."""
    protect_streams("stderr")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # generated text may have characters that a terminal lacks
    chosen: Any = None
    try:
        try:
            chosen = _parse(arguments)
            chosen = getattr(chosen, "command", chosen)
            code = chosen.run()
        finally:  # also after --help, which exits
            _flush_output()
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        return 0
    except KeyboardInterrupt:
        return 130
    except ScheduleError as error:
        print(error, file=sys.stderr)
        return 1
    except OverflowError as error:
        print(f"moe-dualpipe: error: the costs are too small or too large: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        return _fail(error, chosen)
    return code or 0


def _parse(arguments: Sequence[str]) -> Any:
    """The chosen command, with its options."""
    if arguments[:2] == ["check", "parallel"]:  # the rest is for the parser of train.py
        return CheckParallel(tuple(arguments[2:]))
    with one_line_errors():
        return tyro.extras.subcommand_cli_from_dict(
            COMMANDS, args=arguments, prog="moe-dualpipe", description=_DESCRIPTION, config=(OmitSubcommandPrefixes,)
        )


def _fail(error: Exception, command: Any) -> int:
    """Print an error, and return the exit code. Errors of this package other than invalid options are raised.

    command: what was run; None if the arguments were invalid.
    """
    in_layer = command is not None and user_error(error) is not None
    invalid = isinstance(error, ValueError | OSError | ImportError)
    if not in_layer and not invalid:
        raise error
    if os.environ.get("RANK", "0") == "0":  # print once, not on every process of torchrun
        # The cause of an invalid option is an error in a user's layer.
        full_traceback = getattr(command, "traceback", False) and (in_layer or error.__cause__ is not None)
        if in_layer or full_traceback:
            sys.stderr.write(error_text(error, "moe-dualpipe", full_traceback))
        else:
            print(f"moe-dualpipe: error: {describe(error)}", file=sys.stderr)
    return 1 if in_layer or (isinstance(error, OSError) and error.errno in DISK_ERRORS) else 2


def _flush_output() -> None:
    """Raises OSError if that fails. The output is then discarded: Python would flush it again at exit, and fail."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        error.filename = "standard output"
        raise
