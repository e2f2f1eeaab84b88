"""How long a step took, what its communication in the background cost, and how often it waited for data."""

import time

from ..metrics import peak_memory_mb
from . import Extension, Trained, Update


class Timings(Extension):
    """utilization: MFU = this factor x tokens/s of all devices. None: unknown."""

    def __init__(self, trainer: Trained, utilization: float | None):
        self.trainer, self.utilization = trainer, utilization
        self._start = 0.0
        self._background: dict[str, float] = {}

    def before_step(self, step: int) -> None:
        self._start = time.perf_counter()

    def before_update(self, update: Update) -> None:
        """The device has come so far: the loss was read."""
        trainer = self.trainer
        if any(one.group is not None for one in trainer.pipeline.replicas):
            backgrounds = trainer.pipeline.background, trainer.optimizer.gathers.background
            sums, gathers = (one.take_times() for one in backgrounds)
            self._background = {
                "reduce_seconds": round(sums.running, 5), "reduce_exposed_seconds": round(sums.exposed, 5),
                "gather_seconds": round(gathers.running, 5), "gather_exposed_seconds": round(gathers.exposed, 5),
            }  # fmt: skip

    def after_update(self, update: Update) -> None:
        trainer, seconds = self.trainer, time.perf_counter() - self._start
        tokens = trainer.config.batch.batch_size * trainer.config.batch.seq_len
        update.record |= {"seconds": round(seconds, 4), "tokens": tokens, "tokens_per_s": round(tokens / seconds, 1)}
        if self.utilization:
            update.record["mfu"] = round(self.utilization * tokens / seconds, 4)
        update.record |= {"peak_memory_mb": round(peak_memory_mb(trainer.pipeline.device), 1), **self._background}
        if trainer.remote_bytes:
            update.record["mb_between_machines"] = round(trainer.remote_bytes / 1e6, 3)
