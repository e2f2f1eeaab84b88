"""What the planner predicts for a run on GPUs that it knows: how many layers each stage should have, and how long the
actions of the schedule take. It knows a GPU that has a device file, in a run in 16 bits."""

from dataclasses import dataclass, replace

import torch

from ...models.costs import shape_of
from ...runtime.known_gpus import known_device
from ...schedule import Costs
from ...training.config import TrainConfig
from ...training.layout_choice import Choice
from .device import load_device
from .step import stage_costs
from .uneven import best_layers
from .workload import Workload


@dataclass(frozen=True, slots=True)
class RunPrediction:
    """Implements the protocol `StepPrediction` of training/resolve.py."""

    load: Workload

    def best_layers(self, memory: float) -> tuple[int, ...]:
        return best_layers(self.load, memory)

    def costs(self, layers: tuple[int, ...]) -> Costs:
        return stage_costs(replace(self.load, layers=layers))


def predict_run(config: TrainConfig, choice: Choice, dtype: torch.dtype, device: torch.device) -> RunPrediction | None:
    """None for other devices and data types, which no device file describes."""
    half = device.type == "cuda" and dtype.itemsize == 2
    name = known_device(torch.cuda.get_device_name(device)) if half else None
    if name is None:
        return None
    load = Workload(
        shape_of(config.model), load_device(name), choice.layout, config.batch.seq_len, choice.micro_batch_size,
        config.batch.batch_size, "bf16", choice.schedule.name, config.compute.recompute, zero=config.parallel.zero,
    )  # fmt: skip
    return RunPrediction(load)
