"""Expert load balancing in each step: biases of routers, auxiliary losses, loads in the metrics, and a warning.

MaxVio (arXiv 2408.15664) is the largest load of an expert of a layer over the mean load, minus 1: 0 if all are equal.
"""

from collections import deque

import torch
from torch import Tensor

from ...models import ModelConfig
from . import Extension, Trained, Update

PERIOD = 100
"""Steps after which a group without tokens, or a growing MaxVio, is a collapse. Their loads are printed at the end."""
WINDOWS = 10
"""A period is divided into this many windows: MaxVio grows if its mean is larger in each than in the one before."""
STARVED = 0.01
"""An expert with less than this share of the mean load is starved."""


class Balancing(Extension):
    def __init__(self, trainer: Trained):
        self.balance, self.device, self.model = trainer.balance, trainer.device, trainer.config.model
        self._recent: deque[Tensor] = deque(maxlen=PERIOD)
        self._warned = False

    def after_update(self, update: Update) -> None:
        update.record |= load_statistics(update.loads_LE)
        update.record |= self.balance.after_step(update.loads_LE, self.device, move=update.finite)
        self._recent.append(update.loads_LE)
        if not self._warned and len(self._recent) == PERIOD and (fault := self._collapse()):
            self._warned = True
            update.notes.append(f"step {update.step + 1}: {fault}; {self._advice()}")

    def describe(self) -> str:
        """The loads of the last steps in one line; "" without experts."""
        return describe_loads([*self.balance.rows], torch.stack([*self._recent]).sum(0)) if self._recent else ""

    def _collapse(self) -> str:
        load_PLE = torch.stack([*self._recent]).float()
        groups = self.model.expert_groups
        empty_LG = load_PLE.sum(0).unflatten(1, (groups, -1)).sum(2) == 0
        layers = [*self.balance.rows]
        if load_PLE.any() and empty_LG.any():
            layer, group = empty_LG.nonzero()[0].tolist()
            return f"group {group} of the experts of layer {layers[layer]} got no token in {PERIOD} steps"
        means_WL = max_vio(load_PLE).view(WINDOWS, -1, len(layers)).mean(1)
        grows_L = (means_WL.diff(dim=0) > 0).all(0)
        if grows_L.any():
            worst = int((means_WL[-1] * grows_L).argmax())
            first, last = means_WL[0, worst].item(), means_WL[-1, worst].item()
            return f"MaxVio of layer {layers[worst]} grew for {PERIOD} steps, from {first:.2f} to {last:.2f}"
        return ""

    def _advice(self) -> str:
        if self.model.router_bias and self.balance.rate:
            return f"use a larger bias_rate than {self.balance.rate:g}"
        factor = self.model.sequence_loss
        return f"use a larger model.sequence_loss than {factor:g}" if factor else "use --set model.sequence_loss=0.001"


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


def describe_balancing(model: ModelConfig, rate: float) -> str:
    """What balances the experts of a run, in one line; "" for a model without experts. rate: of the biases."""
    if not model.routed_blocks():
        return ""
    ways = [f"biases of the routers, by {rate:g} a step"] * (model.router_bias and rate > 0)
    ways += [f"a sequence-wise loss with factor {model.sequence_loss:g}"] * (model.sequence_loss > 0)
    return f"experts are balanced by {' and '.join(ways) or 'nothing: use model.sequence_loss'}"
