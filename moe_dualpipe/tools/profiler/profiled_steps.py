"""`--profile N`: record some training steps on every rank, and report where their time went.

A recording that cannot be written, as on a full disk, does not end the run: the report says why there is none.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch.profiler import record_function

from ...data import strict_json
from ...messages import plural, printable
from ...overlap.labels import STEP
from ...training.extensions import Extension, Update
from .capture import capture, synchronize
from .reading import read_trace
from .recorded_pipeline import RecordedPipeline, Step, pipelines_text, recorded_steps

WARM_UP = 2
"""Number of steps before the first recorded step."""


def profiled_steps(trainer: Any) -> Extension | None:
    """The extension, if the run is to be profiled. Raises ValueError if the run has too few steps for it."""
    run, steps = trainer.run, trainer.config.metrics.profile
    last = run.start.first_step + WARM_UP + steps
    if not steps or (run.start.restarted and last > trainer.config.steps):
        return None
    if last > trainer.config.steps:
        raise ValueError(
            f"--profile {steps} needs {WARM_UP + steps} steps, including {WARM_UP} to warm up, but "
            f"the run has {trainer.config.steps - run.start.first_step}: use --steps {last}"
        )
    return ProfiledSteps(trainer)


class ProfiledSteps(Extension):
    """Records the steps that follow WARM_UP steps. Collective.

    A recording starts and ends with a barrier, while no other collective is in flight. So all ranks record the same
    collectives.
    """

    def __init__(self, trainer: Any):
        run, first = trainer.run, trainer.run.start.first_step + WARM_UP
        self.optimizer, self.progress = trainer.optimizer, trainer.progress
        self.schedule, self.layout, self.device = run.schedule, run.layout, run.device
        self.folder = run.folder / "profile"
        self.recorded = range(first, first + trainer.config.metrics.profile)
        self.path = self.folder / f"rank{self.layout.rank}.json.gz"
        self._barrier_us, self._error = 0.0, ""
        self._open, self._step = ExitStack(), ExitStack()

    def before_step(self, step: int) -> None:
        if step == self.recorded.start:
            self.optimizer.wait()
            dist.barrier()
            with self._no_failure():
                self.folder.mkdir(parents=True, exist_ok=True)
                self._open.enter_context(capture(self.path, self.device))
            dist.barrier()
            self._barrier_us = time.time_ns() / 1e3
        self._step.enter_context(record_function(f"{STEP}{step + 1}"))

    def after_update(self, update: Update) -> None:
        if update.step in self.recorded:
            synchronize(self.device)  # the recording of a step must include its update
        self._step.close()
        self.exclusive = update.step + 1 in self.recorded
        if update.step + 1 == self.recorded.stop:
            self.optimizer.wait()
            dist.barrier()
            with self._no_failure():
                self._open.close()
            if self._error:
                with suppress(OSError):
                    self.path.unlink(missing_ok=True)  # an incomplete trace would only fill the disk
            with self.progress.during("profile"):
                update.notes.append(self.report())

    @contextmanager
    def _no_failure(self) -> Iterator[None]:
        """Note the error of the body, if it raises one."""
        try:
            yield
        except (OSError, RuntimeError, ValueError) as error:  # torch raises RuntimeError, a damaged file ValueError
            self._error = self._error or f"rank {self.layout.rank}: {error}"

    def report(self) -> str:
        """Write the report, and return it as text on rank 0; "" on other ranks. Collective.

        If a rank could not record or write, the text says why.
        """
        steps, text = None, ""
        with self._no_failure():
            if not self._error:
                actions = self.schedule.actions[self.layout.pp_rank]
                steps = recorded_steps(read_trace(self.path), actions, self._barrier_us)
        ranks: list[tuple[list[Step], str]] | None = None
        if self.layout.rank == 0:
            ranks = [([], "")] * dist.get_world_size()
        dist.gather_object((steps, self._error), ranks, dst=0)
        if ranks is None:
            return ""
        self._error = "; ".join(error for _, error in ranks if error)
        with self._no_failure():
            if not self._error:
                text = self._report([steps for steps, _ in ranks])
        return text or f"no profile: {self._error}"

    def _report(self, steps: list[list[Step]]) -> str:
        """Write the report, and return it as text. steps: of each rank."""
        layout = self.layout
        pipelines = [
            RecordedPipeline(self.schedule, [steps[layout.world_rank(p, d)] for p in range(layout.pp)])
            for d in range(layout.replicas)
        ]
        report = {"pipelines": [pipeline.as_object() for pipeline in pipelines]}
        (self.folder / "report.json").write_text(strict_json.write(report, indent=1) + "\n")
        return (
            f"{plural(len(self.recorded), 'step')} recorded. The step of median length:\n\n{pipelines_text(pipelines)}"
            f"\n\ncommunication, and what else costs time: moe-dualpipe profile analyze {printable(self.folder)}"
        )
