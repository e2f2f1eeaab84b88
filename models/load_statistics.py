"""How evenly the tokens of layers are divided among their experts.

MaxVio (arXiv 2408.15664) is the largest load of an expert of a layer over the mean load, minus 1: 0 if all are equal.

L layers with experts, E experts.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .moe import MoE

STARVED = 0.01
"""An expert with less than this share of the mean load is starved."""


def max_vio(load_PLE: Tensor) -> Tensor:
    """MaxVio of each layer, [..., L] from loads [..., L, E]; 0 for a layer without tokens."""
    mean_PL = load_PLE.float().mean(-1).clamp(min=1e-9)
    return (load_PLE.max(-1).values / mean_PL - 1).clamp(min=0)


def load_statistics(load_LE: Tensor) -> dict[str, float]:
    """What the metrics say of the loads of a step, tokens per layer and expert (metrics.py).

    Example: [[4, 0, 2, 2]] has a mean of 2, so the largest load is 2.0 of the mean, MaxVio 1.0, and one expert in four
    is dead and starved.
    """
    if not load_LE.sum():
        return {}
    vio_L = max_vio(load_LE)
    return {
        "expert_load_max_over_mean": round(vio_L.max().item() + 1, 3), "max_vio": round(vio_L.mean().item(), 3),
        "dead_experts": round((load_LE == 0).float().mean().item(), 4), "starved_experts": starved(load_LE),
    }  # fmt: skip


def starved(load_LE: Tensor) -> int:
    return int((load_LE < STARVED * load_LE.float().mean(1, keepdim=True)).sum())


def describe_loads(layers: list[int], load_LE: Tensor) -> str:
    """MaxVio and the number of starved experts in one line; "" without tokens. layers: the numbers of the rows."""
    if not load_LE.sum():
        return ""
    vio_L = max_vio(load_LE)
    worst, few = int(vio_L.argmax()), starved(load_LE)
    line = f"expert loads: MaxVio {vio_L.mean().item():.2f}, {vio_L[worst].item():.2f} in layer {layers[worst]}"
    return f"{line}; {few} of {load_LE.numel()} experts got less than {STARVED:.0%} of the mean"


@contextmanager
def counted_loads(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """In this context, passes without gradients count, too. At its end, the result has the loads [E] by layer."""
    layers = {layer.layer: layer for layer in model.modules() if isinstance(layer, MoE)}
    loads: dict[int, Tensor] = {}
    before = {number: layer.take_load() for number, layer in layers.items()}
    for layer in layers.values():
        layer.counts_all = True
    try:
        yield loads
    finally:
        for number, layer in layers.items():
            loads[number] = layer.take_load().cpu()
            layer.load_E += before[number]
            layer.counts_all = False


def sum_of_ranks(loads: list[dict[int, Tensor]]) -> tuple[list[int], Tensor]:
    """The layers, and their loads [L, E], from those of each rank."""
    layers = sorted(loads[0])
    rows = [torch.stack([of_rank[layer] for of_rank in loads]).sum(0) for layer in layers]
    return layers, torch.stack(rows) if rows else torch.zeros(0, 1)
