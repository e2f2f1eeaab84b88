"""Replicas of a parameter or a buffer must stay bit-equal: their checksums are compared during the run.

Persistent buffers are saved in checkpoints, and a forward must not change them (runtime/buffers.py).
"""

import torch
from torch import Tensor

from ...errors import without_frames
from ...expert_parallel.gather import first_fault
from ...runtime.buffers import WAY_OUT, Buffers
from ...runtime.replicas import ReplicaSet, check_equal, gather_checksums
from . import Extension, Trained, Update


class ReplicaChecks(Extension):
    """Compares every `check_replicas_every` steps, and when `check` is called."""

    def __init__(self, trainer: Trained):
        self.trainer, self.every = trainer, trainer.config.health.check_replicas_every
        self._registered = False

    def before_update(self, update: Update) -> None:
        """Before the update, which with ZeRO overwrites all replicas with the owner's weights."""
        if not self._registered:
            self._check_registered()
        if self.every and (update.step + 1) % self.every == 0:
            self.check()

    def check(self) -> None:
        """Raise RuntimeError if replicas of a parameter or buffer differ."""
        self.trainer.optimizer.wait()
        with self.trainer.progress.during("comparison of replicas"):
            sets: list[ReplicaSet] = [*self.trainer.pipeline.replicas, *self.trainer.buffers.sets()]
            gathered = [gather_checksums(replicas) for replicas in sets]
        for replicas, sums_RP in zip(sets, gathered, strict=True):
            check_equal(replicas, sums_RP)

    def _check_registered(self) -> None:
        """Raise RuntimeError for a parameter that a layer created in forward: it would be neither trained nor saved."""
        known = {id(p) for replicas in self.trainer.pipeline.replicas for p in replicas.parameters.values()}
        for stage in self.trainer.pipeline.stages.values():
            for name, parameter in stage.named_parameters():
                if id(parameter) not in known:
                    raise without_frames(
                        RuntimeError(f"{name} was created after the optimizer was built: create it in the constructor")
                    )
        self._registered = True


class FixedBuffers(Extension):
    """Refuses a layer whose forward changes a persistent buffer, in the first step of the process."""

    def __init__(self, trainer: Trained):
        self.buffers = Buffers(trainer.pipeline.stages.values(), trainer.pipeline.groups)
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
