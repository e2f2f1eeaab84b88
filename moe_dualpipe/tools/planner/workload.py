"""The run that is planned: a model, the GPUs, how the work is divided over them, and the options of the run.

Numbers that contradict each other raise a ValueError of one line. The commands add a value that fits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Literal

from ...expert_parallel.placement import ExpertPlacement as Experts
from ...kernels.options import Fp8
from ...messages import plural
from ...models.config import Recompute
from ...models.context_parallel import transfers_at_first
from ...models.partition import StageSpec, divide
from ...models.shape import ModelShape
from ...runtime.layout import Layout
from ...schedule.build import check_micro_batches, placement_of, takes_chunks
from ...schedule.placement import Placement
from .device import Device, Precision
from .routing import EpBackend, MeasuredLoads

AttentionKernel = Literal["fastest", "flash2", "plain"]
CudaGraphs = Literal["none", "partial", "full"]
PAIRED = ("dualpipe", "dualpipev", "1f1b_overlap", "interleaved_overlap")
"""Schedules whose actions are pairs of a forward and a backward."""
ELEMENT = 2
"""Bytes of a number outside of products in 8 bits."""


def layout_of(gpus: int, tp: int = 1, pp: int = 1, vpp: int = 1, ep: int = 1, cp: int = 1) -> Layout:
    """The layout of `gpus` GPUs, with gpus / (tp x pp x cp) replicas. vpp: stages of a pipeline rank; 1: the schedule's
    own number. Raises ValueError for a number of GPUs that cannot be divided this way."""
    model = tp * pp * cp
    if gpus % model:
        raise ValueError(f"--gpus {gpus} is not a multiple of tp x pp x cp = {tp} x {pp} x {cp} = {model}")
    return Layout(pp, gpus // model, ep, chunks=vpp if vpp > 1 else None, tp=tp, cp=cp)


def layout_text(one: Layout) -> str:
    """Example: tp 1 pp 4 vpp 2 ep 8 cp 1 dp 16."""
    vpp = f" vpp {one.chunks}" if one.chunks else ""
    return f"tp {one.tp} pp {one.pp}{vpp} ep {one.ep} cp {one.cp} dp {one.dp}"


@dataclass(frozen=True)
class Workload:
    """One training step of `shape`. seq: tokens of a sequence. micro_batch, global_batch: sequences.

    layout: expert groups are formed from all ranks of a pipeline stage, tensor-parallel ranks included, and no expert
    is divided. With ep 1, tensor parallelism divides experts, too.

    overlap: transfers of experts run beside the computation of another micro-batch, in every schedule, as in
    Megatron-LM. None: only in schedules whose actions are pairs (PAIRED), as in this project. zero: the optimizer state
    is divided over replicas. attention: fastest: the device's curves; flash2: PyTorch's FlashAttention-2; plain: scores
    are written to memory. cuda_graphs: what the CPU need not launch again for each micro-batch; partial: attention and
    the router. violation: MaxVio of the experts (routing.py); loads: measured loads instead. experts: their places on
    the ranks of an expert group; None: in order. layers: how many each stage has; empty: `stages_of`. host:
    seconds of the CPU for a launch, instead of those fitted to published runs. fp8: as compute.fp8 of train.py; what it
    does not round to 8 bits is in `precision`. lora: the rank of adapters, of which only the memory counts; 0: none.
    """

    shape: ModelShape
    device: Device
    layout: Layout
    seq: int = 4096
    micro_batch: int = 1
    global_batch: int = 1024
    precision: Precision = "bf16"
    schedule: str = "1f1b"
    recompute: Recompute = "none"
    ep_backend: EpBackend = "all_to_all"
    overlap: bool | None = None
    violation: float = 0.0
    zero: bool = True
    attention: AttentionKernel = "fastest"
    cuda_graphs: CudaGraphs = "none"
    loads: MeasuredLoads | None = None
    experts: Experts | None = None
    layers: tuple[int, ...] = ()
    host: float | None = None
    fp8: Fp8 = "off"
    lora: int = 0

    @cached_property
    def num_micro_batches(self) -> int:
        """Micro-batches of a pipeline in a step."""
        return self.global_batch // (self.micro_batch * self.layout.dp)

    @property
    def expert_tp(self) -> int:
        """Ranks that divide the matrices of an expert."""
        return self.layout.tp if self.layout.ep == 1 else 1

    @property
    def expert_replicas(self) -> int:
        return self.layout.num_ranks // (self.layout.pp * self.layout.ep * self.expert_tp)

    @cached_property
    def placement(self) -> Placement:
        return placement_of(self.schedule, self.layout.pp, self.layout.chunks)

    @cached_property
    def stages(self) -> tuple[StageSpec, ...]:
        """What each stage of the pipeline holds."""
        return stages_of(self.shape, self.placement.num_stages, self.layers)

    @property
    def overlaps(self) -> bool:
        """Whether transfers of experts run beside computation."""
        return self.schedule in PAIRED if self.overlap is None else self.overlap

    @property
    def opens(self) -> int:
        """How many transfers of a forward begin behind the first combine of a pair (`Comm.opens`).

        1: no keys are gathered between segments of pairs, as this project does. With context parallelism, they travel
        around the ranks instead, beside the attention of their own micro-batch.
        """
        layer, cp = self.shape.layers[-1], self.layout.cp if self.overlaps and self.schedule in PAIRED else 1
        return transfers_at_first(cp, layer.attention.gathered, self.shape.hidden, layer.top_k, self.layout.ep)

    @property
    def peak(self) -> float:
        """FLOP/s of a GPU in the precision of the run. `check` refuses a device that has none."""
        return self.device.peak[self.precision] or 0.0

    @property
    def eight_bits(self) -> bool:
        """Whether the inputs of products are rounded to 8 bits."""
        return self.precision in ("fp8", "mxfp8")

    @property
    def expert_precision(self) -> Precision:
        """The precision of the experts' products, except weight gradients in a run with `fp8`."""
        if self.fp8 == "off":
            return self.precision
        return "mxfp8" if self.device.peak.get("mxfp8") else "fp8"

    @property
    def fp8_block(self) -> int:
        """Numbers of a row with one scale, in a run with `fp8`."""
        return 32 if self.expert_precision == "mxfp8" else 128

    @property
    def experts_one_by_one(self) -> bool:
        """Whether the CPU launches a product for each expert.

        Transformer Engine has one kernel for all experts on Hopper. On newer GPUs, which compute in mxfp8, it launches
        a product for each expert. CUDA graphs of whole steps cannot contain these, because the CPU has to know how many
        tokens each expert has. So with such graphs, it uses one kernel there, too (its documentation of GroupedLinear).
        """
        return self.cuda_graphs != "full" and bool(self.device.peak.get("mxfp8"))

    @property
    def fused_activation(self) -> bool:
        """Whether the kernel of the experts' first product also applies SwiGLU and rounds the result.

        True in mxfp8 with full CUDA graphs, as in recipes of NVIDIA-NeMo/Megatron-Bridge@v0.5.0
        (`cutedsl_fused_grouped_mlp`; the kernel is from NVIDIA/TransformerEngine#2622).
        """
        return self.cuda_graphs == "full" and self.precision == "mxfp8"

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.seq

    @property
    def rank_tokens(self) -> float:
        """Tokens of a micro-batch on a rank, where tensor-parallel ranks share the sequence (norms and experts)."""
        return self.micro_batch * self.seq / (self.layout.cp * self.layout.tp)

    def check(self) -> None:
        """Raise ValueError if this cannot run."""
        if self.device.peak.get(self.precision) is None:
            known = ", ".join(name for name, peak in self.device.peak.items() if peak is not None)
            raise ValueError(f"{self.device.name} does not support --dtype {self.precision}: use {known}")
        usable = self.device.fp8_kernels and self.device.peak.get(self.expert_precision)
        if self.fp8 != "off" and (self.eight_bits or not usable):
            name = self.device.name
            why = "contradicts --dtype" if self.eight_bits else f"needs NVIDIA's Hopper or a later GPU, unlike {name}"
            raise ValueError(f"--fp8 {self.fp8} {why}: use --fp8 off")
        if self.loads is not None:
            self.loads.check(self.shape)
        self._check_layout()
        each = self.micro_batch * self.layout.dp
        if self.global_batch % each:
            raise ValueError(
                f"--batch-size {self.global_batch} is not a multiple of micro-batch x dp = {self.micro_batch} x "
                f"{self.layout.dp} = {each}"
            )
        self._check_schedule()

    def _check_layout(self) -> None:
        one, shape, ranks = self.layout, self.shape, self.layout.num_ranks // self.layout.pp
        heads = min(layer.attention.heads for layer in shape.layers)
        experts = max(layer.experts for layer in shape.layers)
        if one.ep > 1 and not experts:
            raise ValueError(f"--ep {one.ep}: {shape.name} has no experts")
        for name, number, of, what in (
            ("tp", one.tp, heads, f"{plural(heads, 'attention head')} of {shape.name}"),
            ("cp", one.cp, self.seq, f"--seq-len {self.seq}"),
            # Between products, tensor-parallel ranks share the tokens.
            ("tp", one.tp, self.seq // one.cp, f"--seq-len {self.seq} / --cp {one.cp}"),
            ("ep", one.ep, experts, f"{plural(experts, 'expert')} of a layer"),
            ("ep", one.ep, ranks, f"{plural(ranks, 'rank')} of a pipeline stage ({one.num_ranks} GPUs / pp {one.pp})"),
        ):
            if of % number:
                raise ValueError(f"--{name} {number} does not divide {what}")
        if shape.mtp >= self.seq:
            raise ValueError(f"--seq-len {self.seq} is too short for {shape.mtp} modules of multi-token prediction")

    def _check_schedule(self) -> None:
        one = self.layout
        if one.chunks and not takes_chunks(self.schedule):
            raise ValueError(f"--vpp {one.chunks} needs --schedule interleaved_1f1b: got {self.schedule}")
        if one.chunks and one.pp == 1:
            raise ValueError(f"--vpp {one.chunks} needs --pp of at least 2: got 1")
        stages = self.placement.num_stages
        if len(self.shape.layers) + 2 < stages:  # the embedding and the head may be stages of their own
            raise ValueError(
                f"{self.shape.name} has {plural(len(self.shape.layers), 'layer')}, too few for {stages} pipeline stages"
            )
        if self.schedule in ("gpipe", "1f1b", "interleaved_1f1b"):
            return  # as in Megatron-LM, any number of micro-batches
        check_micro_batches(self.schedule, one.pp, self.num_micro_batches)


@lru_cache(maxsize=1024)
def stages_of(shape: ModelShape, num_stages: int, numbers: Sequence[int] = ()) -> tuple[StageSpec, ...]:
    """The layers of each stage: as many as `numbers` says, if it is not empty.

    Otherwise, equal numbers of layers on all stages if that is possible, as Megatron-LM divides, or if the embedding
    and the head count as one layer each. If not, the stage with the most FLOPs has as few as possible. The embedding
    and the head may be a stage of their own. Modules of multi-token prediction are on the last stage.
    """
    costs = [1, *(layer.flops(shape.hidden) for layer in shape.layers)]
    costs += [shape.head.flops + shape.mtp * shape.mtp_module_flops]
    layers, whole = len(shape.layers), len(shape.layers) % num_stages == 0
    each, rest = divmod(layers + 2 * (not whole), num_stages)
    even = [each * stage + whole for stage in range(1, num_stages)]
    ends, specs = divide(costs, num_stages) if rest else (*even, layers + 2), []
    if numbers:  # of layers, between the embedding and the head
        ends = (*(1 + end for end in accumulate(numbers[:-1])), layers + 2)
    for start, end in zip((0, *ends), ends, strict=False):
        own, last = range(max(start - 1, 0), min(end - 1, layers)), end == len(costs)
        share, mtp = sum(costs[start:end]) / sum(costs), range(layers, layers + shape.mtp * last)
        specs.append(StageSpec(own, start == 0, last, share, mtp))
    return tuple(specs)
