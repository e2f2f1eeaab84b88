"""The console script `moe-dualpipe`: look at schedules, compare them, check your own.

    moe-dualpipe schedule show dualpipe --ranks 8 --micro-batches 20 --out dualpipe.svg
    moe-dualpipe schedule compare --stages 8 --micro-batches 32 --cost.F 2 --cost.B 5 --cost.W 2 --cost.FB 6
    moe-dualpipe schedule check order.csv

A mistake in what was asked for is one line, and exit code 2; a schedule that breaks a law is exit code 1.
"""

import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import OmitSubcommandPrefixes, Positional, subcommand

from .schedule import (
    NAMES,
    Costs,
    Schedule,
    ScheduleError,
    build,
    placement_of,
    simulate,
    steps_from_csv,
    validate,
    validate_transfers,
)
from .schedule.actions import Recv, Send
from .schedule.compare import compare, table
from .schedule.render import SUFFIXES, save, sizes, text


@dataclass(frozen=True)
class CostOptions(Costs):
    """What the actions of one micro-batch on one stage take: one number for all stages, or one for each."""

    def __post_init__(self) -> None:
        """Checked later, by `checked`: an error in here would be printed in a box."""

    def checked(self) -> Costs:
        return Costs(*astuple(self))


@dataclass(frozen=True)
class Show:
    """Draw a schedule in time, as text or into a file."""

    schedule: Positional[str]
    """gpipe, 1f1b, interleaved_1f1b, zb1p, zbv, chimera, dualpipe, dualpipev, or a CSV file (a line for each rank)."""
    ranks: int = 0
    """Pipeline ranks; a name needs them."""
    micro_batches: int = 0
    """Micro-batches in a step; a name needs them."""
    num_chunks: int = 0
    """Stages on each rank, for interleaved_1f1b. 0: 2."""
    cost: CostOptions = field(default_factory=CostOptions)
    out: Path | None = None
    """Write a file instead: a figure (.svg, .png), a Chrome trace for Perfetto (.json) or the order (.csv)."""
    width: int = 0
    """Columns of the terminal, at least 40. 0: as many as it has."""
    color: Literal["auto", "always", "never"] = "auto"
    """auto: on a terminal, unless NO_COLOR is set."""

    def run(self) -> None:
        costs = self.cost.checked()
        if self.out is not None:
            check_output(self.out, SUFFIXES)
        if self.width and self.width < 40:
            raise ValueError(f"--width must be at least 40: got {self.width}; use 40")
        timeline = simulate(self._schedule(), costs)
        if self.out is not None:
            save(timeline, self.out)
            print(self.out)
            return
        width = self.width or shutil.get_terminal_size().columns
        on_terminal = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(text(timeline, width, self.color == "always" or (self.color == "auto" and on_terminal)))

    def _schedule(self) -> Schedule:
        path = Path(self.schedule)
        if path.suffix.lower() == ".csv" or (self.schedule not in NAMES and path.is_file()):
            if self.ranks or self.micro_batches or self.num_chunks:
                raise ValueError(
                    f"{path} brings its own ranks, micro-batches and chunks: leave out what is said of them"
                )
            return _read(path)[0]
        if not (self.ranks and self.micro_batches):
            placement_of(self.schedule, self.ranks or 2)  # a wrong name is the worse mistake
            raise ValueError(f"{self.schedule} needs --ranks and --micro-batches, as in --ranks 4 --micro-batches 8")
        return build(self.schedule, self.ranks, self.micro_batches, self.num_chunks or None)


@dataclass(frozen=True)
class Compare:
    """All schedules for the same model on the same ranks; memory is the fullest rank's, in the model's stages."""

    stages: int
    """Stages of the model, to which the costs belong; they are joined or cut for a schedule that wants others."""
    micro_batches: int
    """Micro-batches in a step."""
    num_chunks: int = 2
    """Stages on each rank, for interleaved_1f1b."""
    cost: CostOptions = field(default_factory=CostOptions)
    json: bool = False
    """Print JSON, with a number for each rank."""

    def run(self) -> None:
        entries = compare(self.stages, self.micro_batches, self.cost.checked(), self.num_chunks)
        print(json.dumps([entry.as_object() for entry in entries], indent=1) if self.json else table(entries))


@dataclass(frozen=True)
class Check:
    """Check a schedule from a file: complete, in place, able to run; and its sends and receives, if it lists them."""

    file: Positional[Path]
    """CSV with one line for each rank, as torch.distributed.pipelining writes it (compute_only or compute_comms)."""

    def run(self) -> None:
        schedule, transfers = _read(self.file)
        print(
            f"{self.file}: valid; {sizes(schedule)}, {sum(map(len, schedule.actions))} actions"
            + (f", {transfers} transfers that cannot deadlock" if transfers else "")
        )


@dataclass(frozen=True)
class ScheduleCommands:
    """Pipeline schedules: simulate and draw one, compare all, check your own."""

    command: Annotated[
        Annotated[Show, subcommand("show")]
        | Annotated[Compare, subcommand("compare")]
        | Annotated[Check, subcommand("check")],
        tyro.conf.arg(name=""),
    ]


@dataclass(frozen=True)
class Analyze:
    """How much communication was hidden, in a trace that torch.profiler wrote of work on a GPU, or on a CPU."""

    traces: Positional[list[Path]]
    """Chrome traces, .json or .json.gz; of several, each is analyzed, and they are compared."""
    comm_pattern: str | None = None
    """What the name of a communication kernel contains (a regular expression); on a CPU, of an annotation. None: the
    usual libraries'."""
    phases: bool = False
    """A table of the annotations in which work was launched."""
    streams: bool = False
    """A table of the streams, on a CPU threads."""
    kernels: int = 0
    """A table of so many kernels, on a CPU operators: those that took the most time."""
    out: Path | None = None
    """Draw computation above communication into this file (.png, .svg, .html)."""
    json: bool = False
    """Print JSON: an object for one device of one trace, a list of them for more."""

    def run(self) -> None:
        from .profiler import COMMUNICATION
        from .profiler.files import analyze_files

        try:
            pattern = COMMUNICATION if self.comm_pattern is None else re.compile(self.comm_pattern)
        except re.error as error:
            raise ValueError(f"--comm-pattern {self.comm_pattern!r} is no regular expression: {error}") from None
        if self.kernels < 0:
            raise ValueError(f"--kernels cannot be negative: got {self.kernels}")
        if not self.traces:
            raise ValueError("no trace to analyze: name at least one file")
        if self.out is not None:
            check_output(self.out, (".png", ".svg", ".html"))
        found = analyze_files(self.traces, pattern, pictures=self.out is not None)
        for file, events in found.truncated.items():
            print(f"{file}: cut off after {events:,} events; this is about those", file=sys.stderr)
        if self.out is not None:
            found.save(self.out)
        if self.json:
            objects = found.as_objects()
            print(json.dumps(objects[0] if len(objects) == 1 else objects, indent=1))
        else:
            print(found.as_text(self.phases, self.kernels, self.streams))


@dataclass(frozen=True)
class ProfileCommands:
    """What a profiler's trace says about the overlap."""

    command: Annotated[
        # A union needs two.
        Annotated[Analyze, subcommand("analyze")] | Annotated[None, tyro.conf.Suppress],
        tyro.conf.arg(name=""),
    ]


def check_output(path: Path, suffixes: Sequence[str]) -> None:
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"cannot write {path.name!r}: use one of {', '.join(suffixes)}")
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {str(path)!r}: there is no folder {str(path.parent)!r}")


def _read(path: Path) -> tuple[Schedule, int]:
    """The valid schedule in the file, and the number of its transfers, which are valid as well if there are any."""
    try:
        steps = steps_from_csv(path.read_text(encoding="utf-8-sig"))  # without the mark that spreadsheets put first
    except ValueError as error:
        raise ValueError(f"{path}: {'not a text file' if isinstance(error, UnicodeDecodeError) else error}") from None
    schedule = validate(Schedule.from_steps(steps, name=path.name))
    transfers = sum(isinstance(step, Send | Recv) for row in steps for step in row)
    if transfers:
        validate_transfers(schedule, steps)
    return schedule, transfers


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    chosen: Any = tyro.extras.subcommand_cli_from_dict(
        {"schedule": ScheduleCommands, "profile": ProfileCommands},
        args=arguments,
        prog="moe-dualpipe",
        config=(OmitSubcommandPrefixes,),
    )
    try:
        chosen.command.run()
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
        print(f"moe-dualpipe: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
