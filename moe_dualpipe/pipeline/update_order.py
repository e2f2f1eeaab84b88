"""The order of an update: steps add gradients, one sum over replicas, then an optimizer.

Another order gives wrong numbers without an error: replicas that drift apart, gradients that are summed twice or left
out. So the order is checked, also for an optimizer that is not ours: whatever writes a tensor raises its version.
"""

from collections.abc import Iterable
from enum import Enum

import torch
from torch import nn


class Gradients(Enum):
    """NONE: no step has added any. STARTED: their sum over replicas has started."""

    NONE, ADDED, STARTED, SUMMED = range(4)


class UpdateOrder:
    """What was done last with the gradients of `parameters`. Methods raise RuntimeError for a call out of order."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self.parameters = [(parameter, parameter.dtype) for parameter in parameters]
        self.state, self._seen = Gradients.NONE, ()

    def note(self, state: Gradients) -> None:
        """Call after a step or a sum."""
        self.state = state
        self._seen = self._versions()

    def before_step(self) -> None:
        for parameter, dtype in self.parameters:
            if parameter.dtype != dtype:
                raise RuntimeError(
                    f"the weights are {parameter.dtype} now, but the pipeline was built for {dtype}: build it with "
                    f"Numerics(dtype={parameter.dtype})"
                )
        if not torch.is_grad_enabled():
            return
        match self.state:
            case Gradients.STARTED:
                raise RuntimeError("step(sum_gradients=True) has started a sum: call sum_gradients before another step")
            case Gradients.ADDED if self.written():
                raise RuntimeError(
                    "the weights changed although the gradients were not summed over the replicas: call sum_gradients "
                    "between step and the update"
                )
            case Gradients.SUMMED if not self.written():
                raise RuntimeError(
                    "the gradients of the last sum are still there, and another step would be added to them: update "
                    "the weights, or set the gradients to None, before another step"
                )

    def before_update(self) -> None:
        """Check that there is a sum, which the update uses up."""
        if self.state is not Gradients.SUMMED:
            raise RuntimeError("call sum_gradients between step and the update: replicas would differ without it")
        self.state = Gradients.NONE

    @property
    def added(self) -> bool:
        """Whether a step has added gradients since the last sum."""
        return self.state in (Gradients.ADDED, Gradients.STARTED)

    def has_gradients(self) -> bool:
        """Whether this rank has gradients that no step has added: the executor may have run without `Pipeline.step`."""
        return any(parameter.grad is not None for parameter, _ in self.parameters) and self.written()

    def written(self) -> bool:
        """Whether something has written the weights, or after a sum the gradients, since `note`."""
        return self._seen != self._versions()

    def _versions(self) -> tuple[object, ...]:
        weights = tuple(parameter._version for parameter, _ in self.parameters)
        if self.state is not Gradients.SUMMED:
            return weights
        grads = (parameter.grad for parameter, _ in self.parameters)
        return *weights, *((id(grad), grad._version) for grad in grads if grad is not None)
