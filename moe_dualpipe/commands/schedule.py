"""`moe-dualpipe schedule`: look at schedules, compare them, check your own."""

import json
import os
import shutil
import sys
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional, subcommand

from ..drawing.output import check_output
from ..drawing.tables import comparison_table
from ..drawing.timeline_boxes import schedule_sizes
from ..drawing.timeline_file import TIMELINE_SUFFIXES, save_timeline
from ..drawing.timeline_text import timeline_text
from ..schedule import (
    NAMES,
    Costs,
    Schedule,
    build,
    placement_of,
    simulate,
    steps_from_csv,
    validate,
    validate_transfers,
)
from ..schedule.actions import Recv, Send
from ..schedule.compare import compare


@dataclass(frozen=True)
class CostOptions(Costs):
    """What the actions of one micro-batch on one stage take: one number for all stages, or one for each."""

    def __post_init__(self) -> None:
        """Checked later, by `checked`: an error in here would be printed in a box."""

    def checked(self) -> Costs:
        return Costs(*astuple(self))


@dataclass(frozen=True)
class ShowSchedule:
    """Draw a schedule in time, as text or into a file."""

    schedule: Positional[str]
    """gpipe, 1f1b, interleaved_1f1b, zb1p, zbv, chimera, dualpipe, dualpipev, or a CSV file (a line for each rank)."""
    ranks: int | None = None
    """Number of pipeline ranks. Required with a name."""
    micro_batches: int | None = None
    """Number of micro-batches in a step. Required with a name."""
    num_chunks: int | None = None
    """Number of stages on each rank, for interleaved_1f1b. None: 2."""
    cost: CostOptions = field(default_factory=CostOptions)
    out: Path | None = None
    """Write a file instead: a figure (.svg, .png), a Chrome trace for Perfetto (.json) or the order (.csv)."""
    width: int | None = None
    """Number of columns, at least 40. None: the width of the terminal."""
    color: Literal["auto", "always", "never"] = "auto"
    """auto: on a terminal, unless NO_COLOR is set."""

    def run(self) -> None:
        costs = self.cost.checked()
        if self.out is not None:
            check_output(self.out, TIMELINE_SUFFIXES)
        if self.width and self.width < 40:
            raise ValueError(f"--width must be at least 40: got {self.width}; use 40")
        timeline = simulate(self._schedule(), costs)
        if self.out is not None:
            save_timeline(timeline, self.out)
            print(self.out)
            return
        width = self.width or shutil.get_terminal_size().columns
        on_terminal = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(timeline_text(timeline, width, self.color == "always" or (self.color == "auto" and on_terminal)))

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
class CompareSchedules:
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
        print(
            json.dumps([entry.as_object() for entry in entries], indent=1) if self.json else comparison_table(entries)
        )


@dataclass(frozen=True)
class CheckSchedule:
    """Check a schedule from a file: complete, in place, able to run; and its sends and receives, if it lists them."""

    file: Positional[Path]
    """CSV with one line for each rank, as torch.distributed.pipelining writes it (compute_only or compute_comms)."""

    def run(self) -> None:
        schedule, transfers = _read(self.file)
        print(
            f"{self.file}: valid; {schedule_sizes(schedule)}, {sum(map(len, schedule.actions))} actions"
            + (f", {transfers} transfers that cannot deadlock" if transfers else "")
        )


@dataclass(frozen=True)
class ScheduleCommands:
    """Pipeline schedules: simulate and draw one, compare all, check your own."""

    command: Annotated[
        Annotated[ShowSchedule, subcommand("show")]
        | Annotated[CompareSchedules, subcommand("compare")]
        | Annotated[CheckSchedule, subcommand("check")],
        tyro.conf.arg(name=""),
    ]


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
