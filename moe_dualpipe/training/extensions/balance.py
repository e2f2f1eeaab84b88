"""Expert load balancing in each step: biases of routers, auxiliary losses, loads in the metrics, and a warning."""

from collections import deque

import torch
from torch import Tensor

from ...models import ModelConfig
from ...models.load_statistics import describe_loads, load_statistics, max_vio
from . import Extension, Trained, Update

PERIOD = 100
"""Steps after which a group without tokens, or a growing MaxVio, is a collapse. Their loads are printed at the end."""
WINDOWS = 10
"""A period is divided into this many windows: MaxVio grows if its mean is larger in each than in the one before."""


class Balancing(Extension):
    def __init__(self, trainer: Trained):
        self.balance, self.device, self.model = trainer.pipeline.balance, trainer.pipeline.device, trainer.config.model
        self._recent: deque[Tensor] = deque(maxlen=PERIOD)
        self._vio: deque[Tensor] = deque(maxlen=PERIOD)
        self._total_LE: Tensor | None = None  # of the recent steps
        self._warned = False

    def after_update(self, update: Update) -> None:
        update.record |= load_statistics(update.loads_LE)
        update.record |= self.balance.after_step(update.loads_LE, self.device, move=update.finite)
        self._add(update.loads_LE)
        if not self._warned and len(self._recent) == PERIOD and (fault := self._collapse()):
            self._warned = True
            update.notes.append(f"step {update.step + 1}: {fault}; {self._advice()}")

    def describe(self) -> str:
        """The loads of the last steps in one line; "" without experts."""
        return "" if self._total_LE is None else describe_loads([*self.balance.rows], self._total_LE)

    def _add(self, load_LE: Tensor) -> None:
        """Keep the loads of a step, in the time of one step: this runs in each."""
        oldest = self._recent[0] if len(self._recent) == PERIOD else 0
        self._total_LE = load_LE - oldest if self._total_LE is None else self._total_LE + load_LE - oldest
        self._recent.append(load_LE)
        self._vio.append(max_vio(load_LE))

    def _collapse(self) -> str:
        assert self._total_LE is not None
        groups, layers = self.model.expert_groups, [*self.balance.rows]
        empty_LG = self._total_LE.unflatten(1, (groups, -1)).sum(2) == 0
        if self._total_LE.any() and empty_LG.any():
            layer, group = empty_LG.nonzero()[0].tolist()
            return f"group {group} of the experts of layer {layers[layer]} got no token in {PERIOD} steps"
        means_WL = torch.stack([*self._vio]).unflatten(0, (WINDOWS, -1)).mean(1)
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


def describe_balancing(model: ModelConfig, rate: float) -> str:
    """What balances the experts of a run, in one line; "" for a model without experts. rate: of the biases."""
    if not model.routed_blocks():
        return ""
    ways = [f"biases of the routers, by {rate:g} a step"] * (model.router_bias and rate > 0)
    ways += [f"a sequence-wise loss with factor {model.sequence_loss:g}"] * (model.sequence_loss > 0)
    return f"experts are balanced by {' and '.join(ways) or 'nothing: use model.sequence_loss'}"
