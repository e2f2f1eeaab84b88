"""The command line of train.py: options from arguments, and the command that resumes a run."""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from ..messages import shell_word
from ..models import preset
from ..option_errors import one_line_errors
from ..runtime.launch import Launch
from .config import TrainConfig


@dataclass
class _Preset:
    preset: str = TrainConfig.preset


@dataclass
class _Replaced:
    """The options that a resume command replaces."""

    steps: str = ""
    resume: str = ""
    profile: str = ""
    weights: str = ""


def parse_arguments(arguments: Sequence[str], quiet: bool = False) -> TrainConfig:
    """Return the options; `--preset` chooses the defaults of `--model.*`.

    quiet: print no help. Raises ValueError for invalid options, with a message of one line.
    """
    chosen, _ = _parse_known(_Preset, arguments)
    default = TrainConfig(preset=chosen.preset, model=preset(chosen.preset))
    with one_line_errors():
        return tyro.cli(TrainConfig, args=arguments, prog="train.py", default=default, console_outputs=not quiet)


def resume_command(arguments: Sequence[str], run: str, steps: int) -> str:
    """The command that continues, up to `steps`, the run that was started with `arguments`."""
    launch = Launch.from_environment()
    program = [_program("python")]
    if launch.world_size > 1:
        program = [_program("torchrun"), "--nproc-per-node", str(launch.local_world_size)]
    _, others = _parse_known(_Replaced, arguments)
    words = [*program, os.path.relpath(sys.argv[0]), *others, "--resume", run, "--steps", str(steps)]
    return " ".join(map(shell_word, words))


def _parse_known(kind: type, arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """The options of `kind`, and all other arguments."""
    with one_line_errors():
        return tyro.cli(kind, args=arguments, return_unknown_args=True, add_help=False)


def _program(name: str) -> str:
    """`name` if the shell finds the program next to this interpreter, otherwise its path."""
    path = Path(sys.executable).with_name(name)
    if not path.exists() or shutil.which(name) == str(path):
        return name
    return os.path.relpath(path)
