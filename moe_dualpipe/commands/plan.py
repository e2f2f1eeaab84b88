"""`moe-dualpipe plan` and `model`: step time, memory and cost of a run before it starts, and the sizes of models."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from ..checkpoint.expert_loads import find_loads
from ..command_line import Mark, Positional, one_of
from ..kernels.options import Fp8
from ..messages import check_range
from ..models import PRESETS
from ..models.config import Recompute
from ..models.costs import shape_of
from ..runtime.layout import Layout
from ..schedule import NAMES
from ..tools.planner.device import Precision, load_device
from ..tools.planner.layout_search import check_searched, search
from ..tools.planner.prediction import estimate, routings
from ..tools.planner.published_shapes import read_shape
from ..tools.planner.routing import VIOLATION, EpBackend, MeasuredLoads
from ..tools.planner.table import (
    estimate_report,
    measured_report,
    routing_report,
    routing_rows,
    search_report,
    search_rows,
    size_summary,
    sizes_table,
    waterfall_table,
)
from ..tools.planner.workload import AttentionKernel, CudaGraphs, Workload, layout_of
from .options import JsonOption, check_ranges, check_together

PLACEMENTS = {"moved": "moved", "copied": "moved, with 1 copy on each GPU"}
"""Values of --placement, and their rows in the table of placements."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(JsonOption):
    """The options of both commands."""

    model: str
    """A preset, the name of a published model, or a config.json of Hugging Face."""
    gpu: str
    """The name of a GPU, such as h100, or a device file of your own, such as ./my_gpu.json."""
    gpus: int
    """Number of GPUs."""
    cp: int = 1
    """GPUs that share each sequence (context parallelism)."""
    seq_len: int = 4096
    """Sequence length in tokens."""
    batch_size: int = 1024
    """Sequences per step, over all GPUs."""
    dtype: Precision = "bf16"
    """Precision of matrix products. With fp8 and mxfp8, attention, the router and the head stay in bf16."""
    fp8: Fp8 = "off"
    """As compute.fp8 of train.py: products of experts in 8 bits, and their dispatch."""
    ep_backend: EpBackend = "deepep"
    """How tokens are sent to experts. all_to_all: once per expert. deepep, hybrid: once per GPU or NVLink domain."""
    overlap: bool = False
    """Hide expert transfers in every schedule, not only in pairs."""
    no_overlap: bool = False
    """Hide no expert transfers."""
    max_vio: float = VIOLATION
    """Largest load of an expert over the mean, minus 1."""
    loads: Annotated[str | None, Mark("RUN|FILE")] = None
    """Measured loads of experts, instead of --max-vio: a run, a checkpoint, or a JSON file with "loads"."""
    mtp: int | None = None
    """Multi-token prediction (MTP) modules. None: those of the model."""
    attention: AttentionKernel = "fastest"
    """fastest: as in the device's file. flash2: FlashAttention-2, as in PyTorch. plain: scores are stored."""
    cuda_graphs: CudaGraphs = "none"
    """What CUDA graphs replay: nothing, attention and the router (partial), or whole steps (full)."""
    software: str | None = None
    """The software that runs it, such as megatron. None: the mean of all."""

    def workload(self, **options: Any) -> Workload:
        """The workload without its layout and batch. Raises ValueError for invalid options."""
        check_ranges(self, 1, "gpus", "cp", "seq_len", "batch_size")
        check_ranges(self, 0, "mtp", high=16)
        check_ranges(self, 0, "max_vio", high=1000)
        if self.overlap and self.no_overlap:
            raise ValueError("--overlap and --no-overlap contradict each other: use one of them")
        shape = read_shape(self.model)
        return Workload(
            shape if self.mtp is None else replace(shape, mtp=self.mtp), load_device(self.gpu), Layout(),
            seq=self.seq_len, precision=self.dtype, fp8=self.fp8, ep_backend=self.ep_backend,
            overlap=self.overlap if self.overlap or self.no_overlap else None, violation=self.max_vio,
            attention=self.attention, cuda_graphs=self.cuda_graphs,
            loads=MeasuredLoads.read(find_loads(self.loads)) if self.loads else None,
            **options,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EstimateCommand(PlanOptions):
    """Predict the step time of a training run, what it is made of, its memory and its cost."""

    tp: int = 1
    """GPUs that share each matrix (tensor parallelism)."""
    pp: int = 1
    """Pipeline ranks."""
    vpp: int = 1
    """Stages per pipeline rank (virtual pipeline parallelism)."""
    ep: int = 1
    """GPUs that share the experts of a layer."""
    micro_batch_size: int = 1
    """Sequences per micro-batch."""
    schedule: Annotated[str, one_of("auto", *NAMES)] = "auto"
    """Pipeline schedule. auto: 1f1b, and interleaved_1f1b with --vpp."""
    recompute: Recompute = "none"
    """What backward recomputes instead of saving it."""
    zero: bool = True
    """Divide the optimizer state over replicas (ZeRO-1)."""
    lora: int = 0
    """Rank of adapters (train.py --lora). Changes only memory."""
    placement: Literal["moved", "copied"] | None = None
    """With --loads: where the experts are. moved: by their loads. copied: also a copy of one on each GPU."""
    explain: bool = False
    """Also print what each effect adds to the step time."""
    measured: float | None = None
    """Seconds of a step of your own run: calibrates all numbers."""

    def run(self) -> None:
        check_ranges(self, 1, "tp", "pp", "vpp", "ep", "micro_batch_size", high=100_000)
        check_ranges(self, 1e-6, "measured", high=1e6)
        interleaved = self.vpp > 1 and self.schedule in ("auto", "1f1b")
        schedule = "interleaved_1f1b" if interleaved else "1f1b" if self.schedule == "auto" else self.schedule
        check_ranges(self, 0, "lora", high=65_536)
        load = self.workload(schedule=schedule, recompute=self.recompute, zero=self.zero, lora=self.lora)
        numbers = "gpus", "tp", "pp", "vpp", "ep", "cp", "batch_size", "micro_batch_size"
        found = estimate(check_together(self, numbers, lambda chosen: chosen.divided(load)), self.software)
        parts = []
        if self.measured is not None:
            parts.append(measured_report(found, self.measured))
            found = found.measured(self.measured)
        parts.append(estimate_report(found))
        if self.explain:
            parts.append(waterfall_table(found))
        if self.explain or self.loads:
            parts.append(routing_report(found))
        report, experts = found.as_dict(), found.load.experts
        if self.loads:
            report |= {"routing": routing_rows(found), "experts": experts and experts.experts}
        self.show(report, "\n\n".join(parts))

    def divided(self, load: Workload) -> Workload:
        """`load` with this layout and batch. Raises ValueError if it cannot run."""
        layout = layout_of(self.gpus, self.tp, self.pp, self.vpp, self.ep, self.cp)
        load = replace(load, layout=layout, global_batch=self.batch_size, micro_batch=self.micro_batch_size)
        load.check()
        if self.placement is None:
            return load
        if load.loads is None:
            raise ValueError("--placement needs the measured loads of the experts: use --loads")
        return dict(routings(load))[PLACEMENTS[self.placement]]


@dataclass(frozen=True, kw_only=True)
class SearchCommand(PlanOptions):
    """Find the layout and the schedule with the shortest step, and say why the others are slower."""

    top: int = 12
    """Number of layouts to print."""

    def run(self) -> None:
        check_range("--top", self.top, 1, 1000)
        load = self.workload()
        check_together(self, ("gpus", "cp", "batch_size"), lambda chosen: check_searched(chosen.all_gpus(load)))
        found = search(self.all_gpus(load), self.software)
        self.show(search_rows(found, self.top), search_report(found, self.top))

    def all_gpus(self, load: Workload) -> Workload:
        return replace(load, layout=layout_of(self.gpus, cp=self.cp), global_batch=self.batch_size)


@dataclass(frozen=True)
class ShowModel(JsonOption):
    """Show the parameters and the FLOPs of a model. `plan estimate` predicts the memory of each pipeline rank."""

    model: Positional[Annotated[str, Mark("MODEL")]]
    """A preset, the name of a published model, or a config.json of Hugging Face."""
    seq_len: int = 4096
    """Tokens in a sequence."""

    def run(self) -> None:
        """Raises ValueError for invalid options."""
        shape = read_shape(self.model)
        check_ranges(self, 1, "seq_len")
        report = {
            "parameters": shape.parameters, "active_parameters": shape.active_parameters,
            "embedding_parameters": shape.embedding, "forward_flops": shape.forward_flops(self.seq_len),
            "train_flops": shape.train_flops(self.seq_len),
        }  # fmt: skip
        self.show(report, size_summary(shape, self.seq_len))


@dataclass(frozen=True)
class ListModels:
    """List the named models and their sizes."""

    def run(self) -> None:
        print(sizes_table([shape_of(config, name) for name, config in PRESETS.items()]))
