"""Replicas of a parameter or a buffer must stay bit-equal: their checksums are compared during the run."""

from ...errors import without_frames
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
        for stage in self.trainer.stages.values():
            for name, parameter in stage.named_parameters():
                if id(parameter) not in known:
                    raise without_frames(
                        RuntimeError(f"{name} was created after the optimizer was built: create it in the constructor")
                    )
        self._registered = True
