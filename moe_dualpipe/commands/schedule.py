"""`moe-dualpipe schedule`: show, compare and check pipeline schedules."""

import os
import shutil
import sys
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional, arg, subcommand

from .. import strict_json
from ..drawing.captions import schedule_sizes
from ..drawing.output import check_output
from ..drawing.tables import comparison_table
from ..drawing.timeline_file import TIMELINE_SUFFIXES, save_timeline
from ..drawing.timeline_text import timeline_text
from ..messages import check_range, plural, printable
from ..schedule import (
    NAMES,
    Costs,
    Recv,
    Schedule,
    Send,
    build,
    placement_of,
    simulate,
    steps_from_csv,
    validate,
    validate_transfers,
)
from ..schedule.compare import compare


@dataclass(frozen=True)
class CostOptions(Costs):
    """Durations for one micro-batch on one stage: one number for all stages, or one per stage."""

    def __post_init__(self) -> None:
        """Do nothing: tyro would print an error in a box. `checked` validates instead."""

    def checked(self) -> Costs:
        return Costs(*astuple(self))


@dataclass(frozen=True)
class ShowSchedule:
    """Show the timeline of a schedule as text, or save it to a file."""

    schedule: Positional[Annotated[str, arg(metavar="SCHEDULE")]]
    """gpipe, 1f1b, interleaved_1f1b, zb1p, zbv, chimera, dualpipe, dualpipev, or a CSV file with one line per rank."""
    ranks: int | None = None
    """Number of pipeline ranks. Required with a name."""
    micro_batches: int | None = None
    """Number of micro-batches in a step. Required with a name."""
    num_chunks: int | None = None
    """Stages per rank, for interleaved_1f1b. None: 2."""
    cost: CostOptions = field(default_factory=CostOptions)
    out: Path | None = None
    """Save to this file: a figure (.svg, .png), a Chrome trace for Perfetto (.json) or the actions (.csv)."""
    width: int | None = None
    """Number of columns, at least 40. None: the width of the terminal."""
    color: Literal["auto", "always", "never"] = "auto"
    """Use colours. auto: if the output is a terminal and NO_COLOR is not set."""

    def run(self) -> None:
        costs = self.cost.checked()
        if self.out is not None:
            check_output(self.out, TIMELINE_SUFFIXES)
        if self.width:
            check_range("--width", self.width, 40, 10_000)
        timeline = simulate(self._schedule(), costs)
        if self.out is not None:
            save_timeline(timeline, self.out)
            print(printable(self.out))
            return
        width = self.width or shutil.get_terminal_size().columns
        on_terminal = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(timeline_text(timeline, width, self.color == "always" or (self.color == "auto" and on_terminal)))

    def _schedule(self) -> Schedule:
        path = Path(self.schedule)
        if path.suffix.lower() == ".csv" or (self.schedule not in NAMES and path.is_file()):
            if self.ranks or self.micro_batches or self.num_chunks:
                raise ValueError(f"{path} defines the sizes: remove --ranks, --micro-batches and --num-chunks")
            return _read(path)[0]
        if not (self.ranks and self.micro_batches):
            placement_of(self.schedule, self.ranks or 2)  # reports an unknown name first
            raise ValueError(f"{self.schedule} needs --ranks and --micro-batches, as in --ranks 4 --micro-batches 8")
        return build(self.schedule, self.ranks, self.micro_batches, self.num_chunks or None)


@dataclass(frozen=True)
class CompareSchedules:
    """Compare all schedules for the same model. Memory is the maximum over the ranks, in stages of the model."""

    stages: int
    """Number of stages of the model. They run on as many ranks, and on half as many. The costs are for these stages,
    which some schedules merge or split."""
    micro_batches: int
    """Number of micro-batches in a step."""
    num_chunks: int = 2
    """Stages per rank, for interleaved_1f1b."""
    cost: CostOptions = field(default_factory=CostOptions)
    json: bool = False
    """Print JSON, with one number per rank."""

    def run(self) -> None:
        entries = compare(self.stages, self.micro_batches, self.cost.checked(), self.num_chunks)
        objects = [entry.as_object() for entry in entries]
        print(strict_json.write(objects, indent=1) if self.json else comparison_table(entries))


@dataclass(frozen=True)
class CheckSchedule:
    """Validate a schedule from a file, with its sends and receives if it lists them."""

    file: Positional[Annotated[Path, arg(metavar="FILE")]]
    """CSV with one line per rank, in the format of torch.distributed.pipelining (compute_only or compute_comms)."""

    def run(self) -> None:
        schedule, transfers = _read(self.file)
        actions = plural(sum(map(len, schedule.actions)), "action")
        print(
            f"{printable(self.file)}: valid; {schedule_sizes(schedule)}, {actions}"
            + (f", {plural(transfers, 'transfer')} that cannot deadlock" if transfers else "")
        )


@dataclass(frozen=True)
class ScheduleCommands:
    """Pipeline schedules: show one, compare all, or check your own."""

    command: Annotated[
        Annotated[ShowSchedule, subcommand("show")]
        | Annotated[CompareSchedules, subcommand("compare")]
        | Annotated[CheckSchedule, subcommand("check")],
        tyro.conf.arg(name=""),
    ]


def _read(path: Path) -> tuple[Schedule, int]:
    """Return the schedule in the file and the number of its transfers, both validated."""
    try:
        steps = steps_from_csv(path.read_text(encoding="utf-8-sig"))  # without the byte order mark of spreadsheets
    except ValueError as error:
        raise ValueError(
            f"{printable(path)}: {'not a text file' if isinstance(error, UnicodeDecodeError) else error}"
        ) from None
    if not any(steps):
        raise ValueError(f"{printable(path)} has no actions: write one line for each rank, such as 0F0,0F1,0B0,0B1")
    schedule = validate(Schedule.from_steps(steps, name=printable(path.name)))
    transfers = sum(isinstance(step, Send | Recv) for row in steps for step in row)
    if transfers:
        validate_transfers(schedule, steps)
    return schedule, transfers
