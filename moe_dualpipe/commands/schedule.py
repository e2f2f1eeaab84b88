"""`moe-dualpipe schedule`: show, compare and check pipeline schedules."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from ..command_line import Mark, Positional
from ..data.strict_json import read_named
from ..messages import check_range, describe, plural, printable
from ..schedule import (
    NAMES,
    Costs,
    Memory,
    Recv,
    Schedule,
    Send,
    Timeline,
    add_comms,
    build,
    fill,
    least_times,
    placement_of,
    simulate,
    validate,
)
from ..schedule.compare import ComparedSchedule, compare
from ..schedule.schedule_file import is_file_name, read_schedule
from ..tools.drawing.captions import schedule_sizes
from ..tools.drawing.output import check_output
from ..tools.drawing.tables import comparison_table
from ..tools.drawing.timeline_file import TIMELINE_SUFFIXES, save_timeline
from ..tools.drawing.timeline_text import timeline_text
from .options import JsonOption, check_together


@dataclass(frozen=True)
class ChosenSchedule:
    schedule: Positional[Annotated[str, Mark("SCHEDULE")]]
    """gpipe, 1f1b, interleaved_1f1b, 1f1b_overlap, interleaved_overlap, zb1p, zbv, chimera, dualpipe, dualpipev.
    Or a CSV file with one line per rank."""
    pp: int | None = None
    """Number of pipeline ranks. Required with a name."""
    micro_batches: int | None = None
    """Number of micro-batches in a step. Required with a name."""
    num_chunks: int | None = None
    """Stages per rank, for interleaved_1f1b and interleaved_overlap. None: 2."""

    def find(self) -> tuple[Schedule, int]:
        """Return the schedule of a file, or the one of this name and size, and the number of transfers in the file."""
        path, name = Path(self.schedule), self.schedule
        if is_file_name(name) or (name not in NAMES and (path.is_file() or "/" in name)):
            if (self.pp, self.micro_batches) != (None, None) or self.num_chunks:
                raise ValueError(f"{path} defines the sizes: remove --pp, --micro-batches and --num-chunks")
            return read_schedule(path)
        if self.pp is None or self.micro_batches is None:
            placement_of(name, 2 if self.pp is None else self.pp)  # reports an unknown name first
            raise ValueError(f"{name} needs --pp and --micro-batches, as in --pp 4 --micro-batches 8")
        return check_together(self, ("pp", "micro_batches", "num_chunks"), ChosenSchedule._build), 0

    def _build(self) -> Schedule:
        return build(self.schedule, self.pp or 0, self.micro_batches or 0, self.num_chunks or None)


@dataclass(frozen=True)
class ShowSchedule(ChosenSchedule):
    """Show the timeline of a schedule as text, or save it to a file."""

    cost: Costs = field(default_factory=Costs)
    """Durations for one micro-batch on one stage: one number for all stages, or one per stage."""
    out: Path | None = None
    """Save to this file: a figure (.svg, .png) or the actions (.csv)."""
    width: int | None = None
    """Number of columns, at least 40. None: the width of the terminal."""
    until: float | None = None
    """Time at the right end of a figure. Figures with the same end have the same scale. None: the end of the step."""

    def run(self) -> None:
        columns = self._columns()
        schedule, _ = self.find()
        timeline = simulate(schedule, self.cost)
        if self.out is None:
            print(timeline_text(timeline, columns))
            return
        self._save(timeline, self.out)
        print(printable(self.out))

    def _save(self, timeline: Timeline, out: Path) -> None:
        if self.until is not None:
            check_range("--until", self.until, float(timeline.makespan))
        save_timeline(timeline, out, self.until)

    def _columns(self) -> int:
        """The width of the text. Raises ValueError for an invalid --width or --out."""
        if self.out is not None:
            check_output(self.out, TIMELINE_SUFFIXES)
        if self.width:
            check_range("--width", self.width, 40, 10_000)
        return self.width or shutil.get_terminal_size().columns


@dataclass(frozen=True)
class FillSchedule(ShowSchedule):
    """Move the weight gradients of a schedule to where its ranks wait, for measured costs, within the same memory.

    `train.py --schedule FILE.csv` runs the result that --out saves.
    """

    costs: Path | None = None
    """Folder of a run with --profile: its measured costs in milliseconds, in place of --cost."""

    def run(self) -> None:
        columns, (schedule, _) = self._columns(), self.find()
        cost = self.cost if self.costs is None else _measured(self.costs)
        filled = fill(schedule, cost)
        before, after = simulate(schedule, cost), simulate(filled, cost)
        leasts = least_times(schedule.placement, schedule.num_micro_batches, cost, Memory.of(schedule))
        both = before, after
        entries = (ComparedSchedule(one.schedule.name, schedule.num_ranks, one, leasts=leasts) for one in both)
        print("\n\n".join([*(timeline_text(one, columns) for one in both), comparison_table(tuple(entries))]))
        if self.out is not None:
            self._save(after, self.out)
            print(f"\n{printable(self.out)}")


def _measured(run: Path) -> Costs:
    """The costs of the first pipeline of a run that was profiled."""
    path = run / "profile" / "report.json"
    report = read_named(path)
    try:
        return Costs(**report["pipelines"][0]["costs_ms"])
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{printable(path)} has no costs of a pipeline: {describe(error)}") from None


@dataclass(frozen=True)
class CompareSchedules(JsonOption):
    """Compare all schedules for the same model. Memory is the maximum over the ranks, in stages of the model."""

    stages: int
    """Number of stages of the model. They run on as many ranks, and on half as many.
    The costs are for these stages, which some schedules merge or split."""
    micro_batches: int
    """Number of micro-batches in a step."""
    num_chunks: int = 2
    """Stages per rank, for interleaved_1f1b and interleaved_overlap."""
    cost: Costs = field(default_factory=Costs)
    """Durations for one micro-batch on one stage: one number for all stages, or one per stage."""

    def run(self) -> None:
        entries = compare(self.stages, self.micro_batches, self.cost, self.num_chunks)
        self.show([entry.as_object() for entry in entries], comparison_table(entries))


@dataclass(frozen=True)
class CheckSchedule(ChosenSchedule):
    """Check that no rank can wait forever: all actions exist once, and can run in their order with blocking transfers.

    A CSV file has the format of torch.distributed.pipelining (compute_only or compute_comms).
    """

    def run(self) -> None:
        """Raises ScheduleError if a rank may wait forever, and ValueError for invalid options."""
        schedule, _ = self.find()
        steps = [step for row in add_comms(validate(schedule)) for step in row]
        transfers = plural(sum(isinstance(step, Send | Recv) for step in steps), "transfer")
        actions = plural(sum(map(len, schedule.actions)), "action")
        sizes = schedule_sizes(schedule)
        print(f"{printable(self.schedule)}: valid; {sizes}, {actions}, {transfers} that cannot deadlock")
