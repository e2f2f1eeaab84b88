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
from .pipeline import RecordedPipeline
from .reading import read_trace
from .reports.pipeline import pipeline_objects, pipeline_text
from .steps import Step, recorded_steps

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

    The first and the last collective of a recording are barriers, and none is in flight outside of them: all ranks
    record the same ones.
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
                    self.path.unlink(missing_ok=True)  # part of a trace; a full disk needs the space
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
        """Write the report, and return the report as text on rank 0. Collective.

        The text is empty on other ranks. If a rank could not record or write, it says why.
        """
        own = None
        with self._no_failure():
            if not self._error:
                actions = self.schedule.actions[self.layout.pp_rank]
                own = recorded_steps(read_trace(self.path), actions, self._barrier_us)
        ranks = [(own, "")] * dist.get_world_size() if self.layout.rank == 0 else None
        dist.gather_object((own, self._error), ranks, dst=0)
        if ranks is None:
            return ""
        parts, errors = [part for part, _ in ranks if part], [error for _, error in ranks if error]
        text = ""
        if not errors:
            with self._no_failure():
                text = self._report(parts)
        return text or f"no profile: {'; '.join(errors or [self._error])}"

    def _report(self, steps: list[list[Step]]) -> str:
        """Write the report, and return it as text. steps: of each rank."""
        layout = self.layout
        pipelines = [
            RecordedPipeline(self.schedule, [steps[layout.world_rank(p, d)] for p in range(layout.pp)])
            for d in range(layout.dp)
        ]
        report = {"pipelines": pipeline_objects(pipelines)}
        (self.folder / "report.json").write_text(strict_json.write(report, indent=1) + "\n")
        return (
            f"{plural(len(self.recorded), 'step')} recorded. The step of median length:\n\n{pipeline_text(pipelines)}"
            f"\n\ncommunication, and what else costs time: moe-dualpipe profile analyze {printable(self.folder)}"
        )
