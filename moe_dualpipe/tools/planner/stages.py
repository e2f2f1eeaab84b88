"""The memory of the ranks of a planned run, and how many layers each stage should have.

The embedding, the head and dense layers take other times than the rest. Dynamic programming over the seconds of each
layer, after overlap, finds the division whose slowest stage is fastest. If a rank then needs too much memory, its
largest stage gets one layer less, and the layers are divided again.

`plan search` uses it. So does a training run in 16 bits on a GPU with a device file (`predict_run`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import torch

from ...models.config import LORA_TARGETS
from ...models.costs import shape_of
from ...pipeline.activations import MicroBatch
from ...pipeline.peak_memory import Adapters, PeakMemory, peak_memory
from ...runtime.known_gpus import known_device
from ...schedule import Costs, Schedule, build
from ...training.config import TrainConfig
from ...training.layout_choice import Choice
from .device import load_device
from .step import layer_costs, stage_costs, step_of
from .workload import Workload


def memory_of(load: Workload) -> PeakMemory:
    """The memory of the rank that needs the most, by parts."""
    return max(memory_of_ranks(load), key=lambda rank: rank.total)


def memory_of_ranks(load: Workload) -> tuple[PeakMemory, ...]:
    """The memory of each pipeline rank."""
    one = load.layout
    most = load.loads.total_max_over_mean(load.shape, one.ep, load.experts) if load.loads else 1.0
    batch = MicroBatch(
        load.micro_batch, load.seq, ep=one.ep * load.expert_tp, recompute=load.recompute, tp=one.tp, cp=one.cp,
        flash=load.attention != "plain", load=most, fp8_block=load.fp8_block * (load.fp8 != "off"),
    )  # fmt: skip
    schedule = full_schedule(load.schedule, one.pp, load.num_micro_batches, one.chunks)
    kinds = tuple(kind for kind in LORA_TARGETS if kind != "router")
    adapters = Adapters(load.lora, kinds) if load.lora else None
    return peak_memory(
        load.shape, schedule, replace(batch, frozen=bool(adapters)), load.stages, one.dp, load.precision, load.zero,
        adapters=adapters,
    )  # fmt: skip


@lru_cache(maxsize=512)
def full_schedule(name: str, pp: int, num_micro_batches: int, chunks: int | None = None) -> Schedule:
    """A schedule with the same peak memory, but fewer micro-batches: a full pipeline holds no more. gpipe holds all."""
    if name == "gpipe":
        return build(name, pp, num_micro_batches)
    for number in (num_micro_batches, 2 * pp):
        try:
            return build(name, pp, min(number, 3 * pp), chunks)
        except ValueError:
            continue  # it cannot run this number
    return build(name, pp, 4 * pp, chunks)


def best_layers(load: Workload, memory: float) -> tuple[int, ...]:
    """The number of layers of each stage with the shortest predicted step that needs at most `memory` bytes on a rank.

    Empty if the usual division fits and is as fast, or if nothing fits.
    """
    costs, placement = layer_costs(load), load.placement
    most = [len(costs)] * placement.num_stages
    usual = memory_of_ranks(load)
    ways = [load] if max(rank.total for rank in usual) <= memory else []
    while numbers := divide_within(costs, most):
        way = replace(load, layers=numbers)
        rank, needs = max(enumerate(memory_of_ranks(way)), key=lambda one: one[1].total)
        if needs.total <= memory:
            ways.append(way)
            break
        largest = max(placement.stages[rank], key=lambda stage: numbers[stage])
        most[largest] = numbers[largest] - 1
    return min(ways, key=lambda way: step_of(way).seconds, default=load).layers


def divide_within(costs: Sequence[float], most: Sequence[int]) -> tuple[int, ...]:
    """Divide `costs` into consecutive parts so that the largest sum of a part is as small as possible.

    most: the largest number of costs in each part. Returns the numbers; () if no division has at most these.

    Example: costs [1, 1, 1, 3] and most [4, 4] -> (3, 1); most [2, 4] -> (2, 2).
    """
    total = [0.0, *accumulate(costs)]
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by the end of the last part
    for limit in most:
        best = {
            end: min(
                (max(largest, total[end] - total[start]), (*sizes, end - start))
                for start, (largest, sizes) in best.items() if 1 <= end - start <= limit
            )
            for end in range(1, len(total)) if any(1 <= end - start <= limit for start in best)
        }  # fmt: skip
    return best[len(costs)][1] if len(costs) in best else ()


# ---- The same for a training run ----


@dataclass(frozen=True, slots=True)
class RunPrediction:
    """Implements the protocol `StepPrediction` of training/resolve.py."""

    load: Workload

    def best_layers(self, memory: float) -> tuple[int, ...]:
        return best_layers(self.load, memory)

    def costs(self, layers: tuple[int, ...]) -> Costs:
        return stage_costs(replace(self.load, layers=layers))


def predict_run(config: TrainConfig, choice: Choice, dtype: torch.dtype, device: torch.device) -> RunPrediction | None:
    """The prediction for a run; None for devices and data types that no device file describes."""
    half = device.type == "cuda" and dtype.itemsize == 2
    name = known_device(torch.cuda.get_device_name(device)) if half else None
    if name is None:
        return None
    load = Workload(
        shape_of(config.model), load_device(name), choice.layout, config.batch.seq_len, choice.micro_batch_size,
        config.batch.batch_size, "bf16", choice.schedule.name, config.compute.recompute, zero=config.parallel.zero,
    )  # fmt: skip
    return RunPrediction(load)
