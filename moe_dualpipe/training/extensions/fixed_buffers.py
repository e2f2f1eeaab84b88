"""Persistent buffers: saved in checkpoints, and not changed by a forward (runtime/buffers.py)."""

import torch
from torch import Tensor

from ...errors import without_frames
from ...expert_parallel.gather import first_fault
from ...runtime.buffers import WAY_OUT, Buffers
from . import Extension, Trained, Update


class FixedBuffers(Extension):
    """Refuses a layer whose forward changes a persistent buffer, in the first step of the process."""

    def __init__(self, trainer: Trained):
        self.buffers = Buffers(trainer.stages.values(), trainer.pipeline.groups)
        self._before: dict[str, Tensor] | None = None
        self._checked = False

    def before_step(self, step: int) -> None:
        if not self._checked:
            self._before = {name: tensor.clone() for name, tensor in self.buffers.tensors().items()}

    def before_update(self, update: Update) -> None:
        """Raises RuntimeError on all ranks. Router biases may change: that is after the update."""
        if self._before is None:
            return
        tensors = self.buffers.tensors()
        changed = [name for name, before in self._before.items() if not torch.equal(tensors[name], before)]
        self._before, self._checked = None, True
        if fault := first_fault(f"the forward changes the buffer {changed[0]}: {WAY_OUT}" if changed else ""):
            raise without_frames(RuntimeError(fault))

    def state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return state | self.buffers.state()
