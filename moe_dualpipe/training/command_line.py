"""The command line of train.py: options from arguments, and the command that resumes a run."""

import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import tyro

from ..models import preset
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
    return _parse(TrainConfig, arguments, default=default, console_outputs=not quiet)


def resume_command(arguments: Sequence[str], run: str, steps: int) -> str:
    """The command that continues, up to `steps`, the run that was started with `arguments`."""
    launch = Launch.from_environment()
    program = [_program("python")]
    if launch.world_size > 1:
        program = [_program("torchrun"), "--nproc-per-node", str(launch.local_world_size)]
    _, others = _parse_known(_Replaced, arguments)
    return shlex.join([*program, os.path.relpath(sys.argv[0]), *others, "--resume", run, "--steps", str(steps)])


def _parse_known(kind: type, arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """The options of `kind`, and all other arguments."""
    return _parse(kind, arguments, return_unknown_args=True, add_help=False)


def _parse(kind: type, arguments: Sequence[str], **options: Any) -> Any:
    errors = io.StringIO()
    try:
        with redirect_stderr(errors):
            return tyro.cli(kind, args=arguments, prog="train.py", **options)
    except SystemExit as exit_:
        if not exit_.code:
            raise
        raise ValueError(_one_line(errors.getvalue())) from None


def _one_line(box: str) -> str:
    """The message in the box that tyro prints: the first paragraph below the title, without frame and colours."""
    lines = [line.strip("│╭╮╰╯ ") for line in re.sub(r"\x1b\[[\d;]*m", "", box).splitlines()]
    paragraphs = ([*group] for text, group in groupby(lines[1:], lambda line: bool(line.strip("─-"))) if text)
    return " ".join(next(paragraphs, [])).removeprefix("Error parsing model: ")


def _program(name: str) -> str:
    """`name` if the shell finds the program next to this interpreter, otherwise its path."""
    path = Path(sys.executable).with_name(name)
    if not path.exists() or shutil.which(name) == str(path):
        return name
    return os.path.relpath(path)
