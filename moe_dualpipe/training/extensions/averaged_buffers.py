"""Buffers of a layer that are averaged over its replicas in each step, or stay bit-equal (runtime/buffers.py)."""

from torch import Tensor

from ...runtime.buffers import Buffers
from ...runtime.shared_errors import build_on_all_ranks
from . import Extension, Trained, Update


class AveragedBuffers(Extension):
    """Raises ValueError, on all ranks, for a layer with invalid `averaged_buffers`."""

    def __init__(self, trainer: Trained):
        self.recompute = trainer.config.compute.recompute
        self.buffers = build_on_all_ranks(lambda: self._build(trainer))
        self._before: dict[str, Tensor] = {}

    def _build(self, trainer: Trained) -> Buffers:
        buffers = Buffers(trainer.stages.values(), trainer.groups)
        if buffers.averaged and self.recompute == "full":
            what = f"--recompute full would change {min(buffers.averaged)} twice, once in backward"
            raise ValueError(f"{what}: use --recompute attention")
        return buffers

    def before_step(self, step: int) -> None:
        self._before = self.buffers.copies()

    def before_update(self, update: Update) -> None:
        self.buffers.average()

    def after_update(self, update: Update) -> None:
        if not update.finite:
            self.buffers.restore(self._before)

    def state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return state | self.buffers.state()
