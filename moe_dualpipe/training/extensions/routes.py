"""Record the experts of every token of a run, and train with recorded ones (`batch.record_routes`, `replay_routes`).

A micro-batch carries the numbers of its sequences from stage to stage, so routes are found by sequence and position,
whatever the schedule, the layout and the recomputation. Each rank records what its own layers saw.
"""

import re
from typing import Any

import torch

from ...checkpoint.routes import (
    SUFFIX,
    RecordedRoutes,
    check_same_run,
    run_of_file,
    write_routes,
)
from ...data import TextData
from ...data.files import make_folder
from ...data.stores import local_path
from ...data.token_files import SCAN_LIMIT
from ...messages import printable
from ...models import MoE
from ...models.router import Router
from ...runtime.shared_errors import build_on_all_ranks
from . import Extension, Trained, Update

_NAME = re.compile(rf"step-(\d+)-rank-\d+{re.escape(SUFFIX)}")


class Routes(Extension):
    """Raises ValueError, on all ranks, for routes that do not fit the run or lack a sample of it."""

    def __init__(self, trainer: Trained):
        self.trainer, self.batch, self.model = trainer, trainer.config.batch, trainer.config.model
        stages, self.device = trainer.pipeline.stages.values(), trainer.pipeline.device
        modules = (module for stage in stages for module in stage.modules() if isinstance(module, MoE))
        self.layers = {moe.layer: moe for moe in modules if moe.layer < self.model.num_layers}  # not those of MTP
        self.run = build_on_all_ranks(self._run)
        self.folder = local_path(self.batch.record_routes) if self.batch.record_routes else None
        self.replayed = build_on_all_ranks(self._open)
        build_on_all_ranks(self._prepare_folder)

    def _run(self) -> dict[str, Any]:
        """What the numbers in the routes of this run depend on. A program's batches are its own."""
        model, batch, text = self.model, self.batch, self.trainer.run.text
        of_text = isinstance(text, TextData)
        return {
            "layers": [block for block in model.routed_blocks() if block < model.num_layers],
            "num_experts": model.num_experts, "experts_per_token": model.experts_per_token,
            "seq_len": batch.seq_len, "batch_size": batch.batch_size,
            **({"seed": self.trainer.config.seed, "data": f"{text.fingerprint():x}"} if of_text else {}),
        }  # fmt: skip

    def _open(self) -> RecordedRoutes | None:
        if "block" in self.model.own_layers:
            raise ValueError("record_routes and replay_routes need the built-in block, whose router they know")
        if not self.batch.replay_routes:
            return None
        recorded, steps = RecordedRoutes(local_path(self.batch.replay_routes), self.run), self.trainer.config.steps
        for layer, moe in self.layers.items():
            if type(moe.router).choose is not Router.choose:
                raise ValueError(f"replay_routes needs --router topk: got {self.model.router}")
            for step in range(self.trainer.run.start.first_step, steps):
                recorded.check(layer, self._samples(step))
                if recorded.bytes <= SCAN_LIMIT:
                    recorded.read(layer, self._samples(step), self.batch.seq_len)
        return recorded

    def _prepare_folder(self) -> None:
        """Leave only the routes of this run in the folder, of the steps before the first one."""
        if self.folder is None:
            return
        make_folder(self.folder, f"record_routes {printable(self.folder)}")
        replayed = {file.resolve() for file in self.replayed.files} if self.replayed else set()
        for file in sorted(self.folder.glob(f"*{SUFFIX}")) if self.trainer.pipeline.layout.rank == 0 else ():
            if file.resolve() in replayed:
                raise ValueError(f"record_routes: {printable(file)} is one of replay_routes: use another folder")
            match, found = _NAME.fullmatch(file.name), run_of_file(file)
            if match is None or found.keys() != self.run.keys():
                raise ValueError(f"record_routes: {printable(file)} is not of this run: use an empty folder")
            check_same_run(file, found, self.run)
            if int(match[1]) > self.trainer.run.start.first_step:
                file.unlink()

    def _samples(self, step: int) -> range:
        own, first = self.trainer.own_sequences, step * self.batch.batch_size
        return range(first + own.start, first + own.stop)

    def before_step(self, step: int) -> None:
        samples = self._samples(step)
        for layer, moe in self.layers.items():
            cp = 1 if moe.context is None else moe.context.size
            if self.replayed:
                routes_RSK = self.replayed.read(layer, samples, self.batch.seq_len)
                moe.replayed_RSK = (moe.context.cut(routes_RSK) if moe.context else routes_RSK).to(self.device)
            if self.folder:
                shape = len(samples), self.batch.seq_len // cp, self.model.experts_per_token
                moe.recorded_RSK = torch.full(shape, -1, device=self.device)

    def after_update(self, update: Update) -> None:
        if self.folder is None:
            return
        samples_R, found = torch.tensor(self._samples(update.step)), {}
        for layer, moe in self.layers.items():
            assert moe.recorded_RSK is not None
            routes_RSK = moe.recorded_RSK
            routes_RSK = (moe.context.join(routes_RSK) if moe.context else routes_RSK).cpu()
            here_R = (routes_RSK >= 0).flatten(1).any(1)  # other ranks ran the other sequences
            found[layer] = samples_R[here_R], routes_RSK[here_R]
        if any(moe.context and moe.context.rank for moe in self.layers.values()):
            return  # the first rank of each context writes for all
        name = f"step-{update.step + 1:06d}-rank-{self.trainer.pipeline.layout.rank}{SUFFIX}"
        write_routes(self.folder / name, found, self.run)
