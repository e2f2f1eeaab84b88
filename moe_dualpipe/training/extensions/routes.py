"""Record the experts of every token of a run, and train with recorded ones (`batch.record_routes`, `replay_routes`).

A micro-batch carries the numbers of its sequences from stage to stage, so routes are found by sequence and position,
whatever the schedule, the layout and the recomputation. Each rank records what its own layers saw.
"""

from pathlib import Path

import torch

from ...checkpoint.routes import RecordedRoutes, write_routes
from ...data.stores import is_url
from ...messages import printable
from ...models import MoE
from ...models.router import Router
from ...runtime.shared_errors import build_on_all_ranks
from . import Extension, Trained, Update


class Routes(Extension):
    """Raises ValueError, on all ranks, for routes that do not fit the model or lack a sample of the run."""

    def __init__(self, trainer: Trained):
        self.trainer, self.batch, self.model = trainer, trainer.config.batch, trainer.config.model
        modules = (module for stage in trainer.stages.values() for module in stage.modules() if isinstance(module, MoE))
        self.layers = {moe.layer: moe for moe in modules if moe.layer < self.model.num_layers}  # not those of MTP
        self.replayed = build_on_all_ranks(self._open)

    def _open(self) -> RecordedRoutes | None:
        if "block" in self.model.own_layers:
            raise ValueError("record_routes and replay_routes need the built-in block, whose router they know")
        if self.batch.record_routes and is_url(self.batch.record_routes):
            raise ValueError(f"record_routes {printable(self.batch.record_routes)} must be a local folder")
        if not self.batch.replay_routes:
            return None
        recorded, steps = RecordedRoutes(Path(self.batch.replay_routes)), self.trainer.config.steps
        for layer, moe in self.layers.items():
            if type(moe.router).choose is not Router.choose:
                raise ValueError(f"replay_routes needs --router topk: got {self.model.router}")
            for step in range(self.trainer.first_step, steps):
                recorded.check(layer, self._samples(step))
            self._read(recorded, layer, self._samples(steps - 1))
        return recorded

    def _samples(self, step: int) -> range:
        own, first = self.trainer.own_sequences, step * self.batch.batch_size
        return range(first + own.start, first + own.stop)

    def _read(self, recorded: RecordedRoutes, layer: int, samples: range) -> torch.Tensor:
        model = self.model
        return recorded.read(layer, samples, self.batch.seq_len, model.experts_per_token, model.num_experts)

    def before_step(self, step: int) -> None:
        samples = self._samples(step)
        for layer, moe in self.layers.items():
            if self.replayed:
                moe.replayed_RSK = self._read(self.replayed, layer, samples).to(self.trainer.device)
            if self.batch.record_routes:
                shape = len(samples), self.batch.seq_len, self.model.experts_per_token
                moe.recorded_RSK = torch.full(shape, -1, device=self.trainer.device)

    def after_update(self, update: Update) -> None:
        if not self.batch.record_routes:
            return
        samples_R, found = torch.tensor(self._samples(update.step)), {}
        for layer, moe in self.layers.items():
            assert moe.recorded_RSK is not None
            routes_RSK = moe.recorded_RSK.cpu()
            here_R = (routes_RSK >= 0).flatten(1).any(1)  # other ranks ran the other sequences
            found[layer] = samples_R[here_R], routes_RSK[here_R]
        name = f"step-{update.step + 1:06d}-rank-{self.trainer.layout.rank}.safetensors"
        write_routes(Path(self.batch.record_routes, name), found)
