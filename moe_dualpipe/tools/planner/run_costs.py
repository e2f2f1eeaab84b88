"""What the planner tells a run before it starts: how many layers each stage should have, and how long its actions take.

On a GPU of a known kind and in 16 bits, the times are those of the planner. Elsewhere they are in proportion to FLOPs,
by which the layers are divided anyway.
"""

from dataclasses import replace

import torch

from ...models import split
from ...models.costs import shape_of
from ...runtime.layout import Layout
from ...schedule import Costs, Schedule
from ...training.config import TrainConfig
from .device import known_device, load_device
from .step import stage_costs
from .uneven import best_layers
from .workload import Workload


def layers_of_run(
    config: TrainConfig, schedule: Schedule, layout: Layout, dtype: torch.dtype, device: torch.device, free: int | None
) -> tuple[int, ...]:
    """The numbers of layers for `parallel.layers=auto`; empty: the usual ones. free: bytes that each rank may use."""
    load = _workload(config, schedule, layout, dtype, device)
    return best_layers(load, float("inf") if free is None else free) if load else ()


def costs_of_run(
    config: TrainConfig, schedule: Schedule, layout: Layout, dtype: torch.dtype, device: torch.device,
    layers: tuple[int, ...],
) -> Costs:  # fmt: skip
    """The costs of the actions of `schedule` on each stage, in seconds or FLOPs."""
    if load := _workload(config, schedule, layout, dtype, device):
        return stage_costs(replace(load, layers=layers))
    shares = tuple(spec.share for spec in split(config.model, schedule.num_stages, layers))
    return Costs(F=shares, B=tuple(2 * share for share in shares))


def _workload(
    config: TrainConfig, schedule: Schedule, layout: Layout, dtype: torch.dtype, device: torch.device
) -> Workload | None:
    half = device.type == "cuda" and dtype.itemsize == 2
    name = known_device(torch.cuda.get_device_name(device)) if half else None
    if name is None:
        return None
    batch, compute = config.batch, config.compute
    return Workload(
        shape_of(config.model), load_device(name), layout, batch.seq_len,
        batch.batch_size // (layout.dp * schedule.num_micro_batches), batch.batch_size,
        "bf16", schedule.name, compute.recompute, zero=config.parallel.zero,
    )  # fmt: skip
