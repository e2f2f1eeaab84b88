"""`moe-dualpipe schedule`: show, compare and check pipeline schedules."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from ..data.strict_json import read_named
from ..messages import check_range, describe, plural, printable
from ..schedule import (
    NAMES,
    Costs,
    Memory,
    Schedule,
    Timeline,
    build,
    fill,
    least_times,
    placement_of,
    simulate,
)
from ..schedule.compare import ComparedSchedule, compare
from ..schedule.launches import check_launches
from ..schedule.schedule_file import is_file_name, read_schedule
from ..tools.drawing.figures import check_output
from ..tools.drawing.tables import comparison_table, launches_table
from ..tools.drawing.timeline import schedule_sizes
from ..tools.drawing.timeline_figure import TIMELINE_SUFFIXES, save_timeline
from ..tools.drawing.timeline_text import timeline_text
from .options import JsonOption, check_together

MOST_RECORDED = 50_000  # layers x micro-batches x ep: about 20 minutes on one core


@dataclass(frozen=True)
class ChosenSchedule:
    schedule: Positional[Annotated[str, arg(metavar="SCHEDULE")]]
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
    """Check that no rank can wait forever: validate a schedule, then compare what all ranks launch.

    The pipeline of every rank runs in this process, with a tiny model. Transfers and collectives are recorded, not run.
    A CSV file has the format of torch.distributed.pipelining (compute_only or compute_comms).
    """

    ep: int = 2
    """Number of ranks that share the experts of a layer."""
    num_layers: int | None = None
    """Number of layers of the model. None: two for each stage."""
    dense_layers: tuple[int, ...] = (0,)
    """Layers without experts, counted from 0."""
    mtp_layers: int = 0
    """Multi-token prediction: number of further layers in the loss."""
    actions_only: bool = False
    """Only validate the schedule; do not compare launches."""

    def run(self) -> None:
        """Raises ScheduleError if a rank may wait forever, and ValueError for invalid options."""
        schedule, transfers = self.find()
        layers = self.num_layers if self.num_layers is not None else 2 * schedule.num_stages
        if not self.actions_only:
            check_range("--ep", self.ep, 1, 1024)
            check_range("--num-layers", layers, 1)
            check_range("--mtp-layers", self.mtp_layers, 0)
            for layer in self.dense_layers:
                check_range("--dense-layers", layer, 0, layers - 1)
            recorded = (layers + self.mtp_layers) * schedule.num_micro_batches * self.ep
            check_range("layers x micro-batches x ep", recorded, 1, MOST_RECORDED, "; use fewer, or --actions-only")
        actions = plural(sum(map(len, schedule.actions)), "action")
        valid = f"{printable(self.schedule)}: valid; {schedule_sizes(schedule)}, {actions}" + (
            f", {plural(transfers, 'transfer')} that cannot deadlock" if transfers else ""
        )
        print(valid if self.actions_only else f"{valid}\n\n{self._check_launches(schedule, layers)}")

    def _check_launches(self, schedule: Schedule, layers: int) -> str:
        from ..pipeline.record_launches import record_launches, tiny_model

        model = tiny_model(layers, self.dense_layers, self.ep, self.mtp_layers)
        counts = {}
        for device, queued in (("CPU", False), ("GPU", True)):
            programs = record_launches(model, schedule, self.ep, queued)
            counts = check_launches(f"{schedule.name}, as on a {device}", programs)
        return launches_table(counts, layers, self.ep)
