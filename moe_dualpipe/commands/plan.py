"""`moe-dualpipe plan`: step time, memory and cost of a training run before it starts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import subcommand

from ..data import strict_json
from ..messages import LARGEST, check_range
from ..models.config import Recompute
from ..tools.planner.device import Precision
from ..tools.planner.transfer_times import EpBackend
from .plan_calibrate import CalibrateCommand

if TYPE_CHECKING:
    from ..tools.planner.measured_loads import MeasuredLoads
    from ..tools.planner.workload import Workload

ScheduleChoice = Literal["auto", "gpipe", "1f1b", "interleaved_1f1b", "zb1p", "zbv", "chimera", "dualpipe", "dualpipev"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What both commands take."""

    model: str
    """A preset, the name of a published model, or a config.json of Hugging Face."""
    gpu: str
    """The name of a GPU, such as h100, or a file that `moe-dualpipe plan calibrate` wrote."""
    gpus: int
    """Number of GPUs."""
    cp: int = 1
    """GPUs that share each sequence (context parallelism)."""
    seq: int = 4096
    """Sequence length in tokens."""
    global_batch: int = 1024
    """Sequences per step, over all GPUs."""
    precision: Precision = "bf16"
    """Precision of matrix products. With fp8 and mxfp8, attention, the router and the head stay in bf16."""
    ep_backend: EpBackend = "deepep"
    """How tokens are sent to experts. all_to_all: once per expert. deepep, hybrid: once per GPU or NVLink domain."""
    overlap: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Hide expert transfers in every schedule, as Megatron-LM can. Otherwise only in dualpipe and dualpipev."""
    no_overlap: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Hide no expert transfers."""
    routing: Literal["balanced", "real"] = "real"
    """real: some experts get more tokens, as in trained models. balanced: all get the same number."""
    loads: Annotated[str | None, tyro.conf.arg(metavar="RUN|FILE")] = None
    """Measured loads of experts, instead of --routing: a run, a checkpoint, or a file of `model balance`."""
    mtp: int | None = None
    """Multi-token prediction (MTP) modules. None: as many as the model has."""
    flash_attention: bool = True
    """Attention in one kernel, without storing scores."""
    software: str | None = None
    """Take the measured constant from runs of this software only, such as megatron. None: from all runs."""
    json: bool = False
    """Print JSON instead."""

    def workload(self, tp: int, pp: int, vpp: int, ep: int, **options) -> "Workload":
        """Raises ValueError for invalid options."""
        import dataclasses

        from ..tools.planner.device import load_device
        from ..tools.planner.published_shapes import read_shape
        from ..tools.planner.workload import Workload, layout_of

        for name in ("gpus", "cp", "seq", "global_batch"):
            check_range(f"--{name.replace('_', '-')}", getattr(self, name), 1, LARGEST)
        if self.overlap and self.no_overlap:
            raise ValueError("--overlap and --no-overlap contradict each other: use one of them")
        shape = read_shape(self.model)
        if self.mtp is not None:
            check_range("--mtp", self.mtp, 0, 16)
            shape = dataclasses.replace(shape, mtp=self.mtp)
        return Workload(
            shape, load_device(self.gpu), layout_of(self.gpus, tp, pp, vpp, ep, self.cp), seq=self.seq,
            global_batch=self.global_batch, precision=self.precision, ep_backend=self.ep_backend,
            overlap=self.overlap if self.overlap or self.no_overlap else None, routing=self.routing,
            flash=self.flash_attention, loads=self._read_loads(), **options,
        )  # fmt: skip

    def _read_loads(self) -> "MeasuredLoads | None":
        from ..tools.planner.measured_loads import MeasuredLoads
        from .balance import find_loads

        if self.loads is None:
            return None
        if self.routing == "balanced":
            raise ValueError("--loads and --routing balanced contradict each other: use one of them")
        return MeasuredLoads.read(find_loads(self.loads))


@dataclass(frozen=True, kw_only=True)
class EstimateCommand(Run):
    """Predict the step time of a training run, what it is made of, its memory and its cost."""

    tp: int = 1
    """GPUs that share each matrix (tensor parallelism)."""
    pp: int = 1
    """Pipeline ranks."""
    vpp: int = 1
    """Stages per pipeline rank (virtual pipeline parallelism)."""
    ep: int = 1
    """GPUs that share the experts of a layer."""
    micro_batch: int = 1
    """Sequences per micro-batch."""
    schedule: ScheduleChoice = "auto"
    """Pipeline schedule. auto: 1f1b, and interleaved_1f1b with --vpp."""
    recompute: Recompute = "none"
    """What backward recomputes instead of saving it."""
    zero: bool = True
    """Divide the optimizer state over replicas (ZeRO-1)."""
    explain: bool = False
    """Also print what each effect adds to the step time."""

    def run(self) -> None:
        from ..tools.planner.prediction import estimate
        from ..tools.planner.table import estimate_report, routing_line, waterfall_table

        for name in ("tp", "pp", "vpp", "ep", "micro_batch"):
            check_range(f"--{name.replace('_', '-')}", getattr(self, name), 1, 100_000)
        interleaved = self.vpp > 1 and self.schedule in ("auto", "1f1b")
        schedule = "interleaved_1f1b" if interleaved else "1f1b" if self.schedule == "auto" else self.schedule
        load = self.workload(
            self.tp, self.pp, self.vpp, self.ep, micro_batch=self.micro_batch, schedule=schedule,
            recompute=self.recompute, zero=self.zero,
        )  # fmt: skip
        found = estimate(load, self.software)
        if self.json:
            print(strict_json.write(found.as_dict(), indent=1))
        else:
            print(estimate_report(found))
            if self.explain:
                print(f"\n{waterfall_table(found)}\n\n{routing_line(found.load)}")


@dataclass(frozen=True, kw_only=True)
class SearchCommand(Run):
    """Find the layout and the schedule with the shortest step, and say why the others are slower."""

    top: int = 12
    """Number of layouts to print."""

    def run(self) -> None:
        from ..tools.planner.layout_search import search
        from ..tools.planner.table import search_report, search_rows

        check_range("--top", self.top, 1, 1000)
        found = search(self.workload(1, 1, 1, 1), self.software)
        if self.json:
            print(strict_json.write(search_rows(found, self.top), indent=1))
        else:
            print(search_report(found, self.top))


@dataclass(frozen=True)
class PlanCommands:
    """Step time, memory and cost of a training run, before it starts."""

    command: Annotated[
        Annotated[EstimateCommand, subcommand("estimate")]
        | Annotated[SearchCommand, subcommand("search")]
        | Annotated[CalibrateCommand, subcommand("calibrate")],
        tyro.conf.arg(name=""),
    ]
