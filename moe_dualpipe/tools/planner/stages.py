"""The layers of each stage of a planned run, and the memory of each of its pipeline ranks."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from ...models import StageSpec
from ...models.partition import divide
from ...models.shape import ModelShape
from ...pipeline.activations import MicroBatch
from ...pipeline.peak_memory import PeakMemory, peak_memory
from ...schedule import Schedule, build
from .workload import Workload


def memory_of(load: Workload) -> PeakMemory:
    """The memory of the fullest rank, by parts."""
    return max(memory_of_ranks(load), key=lambda rank: rank.total)


def memory_of_ranks(load: Workload) -> tuple[PeakMemory, ...]:
    """The memory of each pipeline rank."""
    one = load.layout
    fullest = load.loads.fullest(load.shape, one.ep, load.experts) if load.loads else 1.0
    batch = MicroBatch(
        load.micro_batch, load.seq, ep=one.ep * load.expert_tp, recompute=load.recompute, tp=one.tp, cp=one.cp,
        flash=load.attention != "plain", load=fullest, fp8_block=load.fp8_block * (load.fp8 != "off"),
    )  # fmt: skip
    schedule = full_schedule(load.schedule, one.pp, load.num_micro_batches, one.chunks)
    stages = stages_of(load.shape, load.placement.num_stages, load.layers)
    return peak_memory(load.shape, schedule, batch, one.dp, load.precision, load.zero, stages=stages)


@lru_cache(maxsize=512)
def full_schedule(name: str, pp: int, num_micro_batches: int, chunks: int | None = None) -> Schedule:
    """A schedule of at most this many micro-batches with the same peak memory: once the pipeline is full, a rank holds
    no more. gpipe holds them all.
    """
    if name == "gpipe":
        return build(name, pp, num_micro_batches)
    for number in (num_micro_batches, 2 * pp):
        try:
            return build(name, pp, min(number, 3 * pp), chunks)
        except ValueError:
            continue  # it cannot run this number
    return build(name, pp, 4 * pp, chunks)


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
        blocks = range(max(start - 1, 0), min(end - 1, layers) + shape.mtp * (end == len(costs)))
        specs.append(StageSpec(blocks, start == 0, end == len(costs), sum(costs[start:end]) / sum(costs)))
    return tuple(specs)
