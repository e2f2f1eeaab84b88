"""The command line of train.py: options from arguments, and the command that resumes a run."""

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import tyro

from ..health.program import program_name, training_command
from ..health.report import report_error
from ..messages import describe, shell_word
from ..models import preset
from ..option_errors import one_line_errors
from ..runtime.launch import Launch
from .config import CheckpointConfig, TrainConfig


@dataclass
class _Start:
    """The options that choose the model, unless --model.* does."""

    preset: str | None = None
    resume: str | None = None
    weights: str | None = None
    staging: str | None = None


@dataclass
class _Replaced:
    """The options that a resume command replaces."""

    steps: str = ""
    resume: str = ""
    profile: str = ""
    weights: str = ""
    weights_partial: bool = False
    export: str = ""


def parse_arguments(
    arguments: Sequence[str], quiet: bool = False, defaults: TrainConfig | None = None, program: str = "",
    description: str | None = None,
) -> TrainConfig:  # fmt: skip
    """Return the options. `--preset`, or else `--resume` or `--weights`, chooses the defaults of `--model.*`.

    quiet: print no help. defaults: those of all other options. program: the command in the help; "": as this process
    was started. description: the first lines of the help; None: how to train.
    Raises ValueError for invalid options, with a message of one line.
    """
    arguments = join_repeated("--freeze", join_layer_options(arguments))
    chosen, _ = _parse_known(_Start, arguments)
    if chosen.preset is not None:
        preset(chosen.preset)  # raises ValueError with the nearest name
    start = CheckpointConfig(resume=chosen.resume, weights=chosen.weights, staging=chosen.staging)
    model = TrainConfig(preset=chosen.preset, checkpoint=start).model
    default = replace(defaults or TrainConfig(), preset=chosen.preset, model=model)
    with one_line_errors():
        return tyro.cli(
            TrainConfig, args=arguments, prog=program or program_name(), default=default, console_outputs=not quiet,
            description=description,
        )  # fmt: skip


def join_layer_options(arguments: Sequence[str]) -> list[str]:
    """Write options of custom layers as words: `--model.expert-options.rank 8` as `--model.expert-options rank=8`.

    Their names are known only to the layer, so the parser cannot know these flags. Several values are a list.
    """
    others: list[str] = []
    options: dict[str, list[str]] = {}
    target: list[str] | None = None  # where the values of the last flag go; None: to the others
    for word in arguments:
        if found := _LAYER_OPTION.fullmatch(word):
            part, name, value = found.groups()
            target = options.setdefault(f"--model.{part}-options", [])
            target += [f"{name.replace('-', '_')}={value or ''}"] if name else []
            takes_values = name is not None and value is None
        elif word.startswith("--"):
            target = None
            others.append(word)
        elif target is None:
            others.append(word)
        elif takes_values:
            target[-1] += word if target[-1].endswith("=") else f",{word}"
        else:
            target.append(word)
    return others + [word for flag, words in options.items() for word in (flag, *words)]


def join_repeated(flag: str, arguments: Sequence[str]) -> list[str]:
    """Write a flag that is given several times once, with all values: the parser would use only the last."""
    others: list[str] = []
    values: list[str] = []
    target = others
    for word in arguments:
        name, equals, value = word.partition("=")
        if name == flag:
            target = values
            values += [value] * bool(equals)
        else:
            target = others if word.startswith("--") else target
            target.append(word)
    return [*others, flag, *values] if values else others


_LAYER_OPTION = re.compile(
    r"--model\.(expert|router|attention|block)[-_]options(?:\.([a-zA-Z_][\w-]*)(?:=(.*))?)?", re.S
)


@contextmanager
def exit_on_invalid_option(
    announce: bool, *kinds: type[Exception], full_traceback: bool = False
) -> Iterator[None]:  # fmt: skip
    """In this context, errors of these kinds end the process with code 2. announce: print them, on one line.

    full_traceback: also print the traceback of an error whose cause is one in a user's layer.
    """
    try:
        yield
    except kinds as error:
        if announce:
            if full_traceback and error.__cause__ is not None:
                report_error("".join(traceback.format_exception(error)))
            report_error(f"{program_name()}: error: {describe(error)}\n")
        raise SystemExit(2) from None


def resume_command(arguments: Sequence[str], run: str, steps: int) -> str:
    """The command that continues, up to `steps`, the run that was started with `arguments`."""
    launch = Launch.from_environment()
    program = training_command(launch.local_world_size if launch.world_size > 1 else None)
    _, others = _parse_known(_Replaced, arguments)
    words = [*program, *others, "--resume", run, "--steps", str(steps)]
    return " ".join(map(shell_word, words))


def _parse_known(kind: type, arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """The options of `kind`, and all other arguments."""
    with one_line_errors():
        return tyro.cli(kind, args=arguments, return_unknown_args=True, add_help=False)
