"""The loop of a training run: steps, validation, checkpoints and reports, up to the last checkpoint."""

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from ..checkpoint import Saver, SaveResult, find_checkpoint
from ..checkpoint.huggingface import companion_files, plan_checkpoint_export
from ..data import stores as storage
from ..data import tokenizer_files
from ..health.heartbeat import SAVING
from ..messages import printable
from . import store_run
from .metrics import peak_memory_mb, progress_bar
from .nonfinite import first_nonfinite
from .profiling import StepProfiler
from .reporter import Reporter, RunFailed
from .sinks import Sink
from .trainer import Trainer

Callback = Callable[[Trainer, dict[str, float]], object]
_ADVICE = "resume from an earlier one with a lower --optim.lr, or check the data"


class TrainingRun:
    """Training steps, checkpoints and reports, in order. Collective.

    sinks: also get the metrics, on the first rank. callbacks: called as `callback(trainer, record)` after each step on
    every rank, before the record is written. verbose: False prints nothing.
    """

    def __init__(
        self, trainer: Trainer, sinks: Sequence[Sink] = (), callbacks: Sequence[Callback] = (), verbose: bool = True
    ):
        self.trainer, self.plan, self.config, self.callbacks = trainer, trainer.plan, trainer.config, callbacks
        trainer.wait_for_weights = bool(callbacks)  # they may read weights
        setup, options = trainer.plan.setup, self.config.checkpoint
        self.reporter, self.saver = Reporter(self.plan, sinks, verbose), None
        if setup.folder:
            keep, announce = options.keep or 0, trainer.progress.save.note
            patience = storage.Patience(self.config.health.timeout / 2)  # then, the run is not taken for one that hangs
            self.saver = Saver(setup.folder, self.config.model, keep, options.save_async, announce, patience)
        folder, steps = (setup.folder or Path()) / "profile", (self.plan.profiled_steps, self.plan.first_step)
        self.profiler = StepProfiler(folder, *steps, setup.schedule, setup.layout, setup.device)
        self.last_save: SaveResult | None = None
        self.stopped = False
        """Whether the run was stopped before its last step."""

    def run(self) -> None:
        """Train until the last step or a request to stop.

        Exits with code 1 if the last checkpoint was not written, or if the run did not give a model with a finite loss.
        """
        trainer, reporter = self.trainer, self.reporter
        with closing(self), closing(reporter):
            state_mb = trainer.largest(trainer.optimizer.state_bytes / 2**20)
            reporter.introduce(*trainer.count_parameters(), state_mb)
            if trainer.layout.ep > 1:
                reporter.say(str(trainer.pipeline.expert_parallel))
            self._say_moves()
            if trainer.partial:
                reporter.loaded(trainer.partial)
            trainer.check_replicas()
            before = None
            if self.plan.text.has_held_out:
                before = self._validation_loss(f"before step {self.plan.first_step + 1}")
                reporter.metrics.write(step=self.plan.first_step, validation_loss=before)
                reporter.say(f"validation loss before: {self.plan.text.format_losses(before)}")
            done = self._train()
            self._check_skipped(done)
            self.stopped = done < self.config.steps
            if self.stopped or trainer.stopping:
                self._stop(done)
            else:
                self._finish(before)

    def close(self) -> None:
        """Finish the last save."""
        if self.saver:
            with self.trainer.progress.during(SAVING):
                self.saver.close()

    def _train(self) -> int:
        """Train; returns the number of steps that are done."""
        trainer, steps = self.trainer, self.config.steps
        save_every, eval_every = self.config.checkpoint.save_every, self.config.metrics.eval_every
        done, save_due, eval_due = self.plan.first_step, False, False
        trainer.stop.completes = "this step and a checkpoint"
        with trainer.progress.during("reading the first data"):
            trainer.read_ahead.fill(done)
        with progress_bar(steps, done, self.reporter.verbose) as bar:
            for step in range(done, steps):
                with self.profiler.step(step):
                    record = trainer.train_step(step)
                self._call_back(record)
                self.reporter.step(record, bar)
                self._say_moves()
                done = step + 1
                save_due |= bool(save_every and done % save_every == 0)
                eval_due |= bool(eval_every and done % eval_every == 0)
                # After a skipped step, the weights are as before and may be the reason: wait for an update.
                ready = done < steps and not (trainer.stopping or trainer.skipped.in_a_row)
                if eval_due and ready and not self.profiler.recording(done):
                    self._record_validation(done)  # before the save: a checkpoint has a finite validation loss
                    eval_due = False
                if save_due and ready:
                    self._start_save(done)
                    save_due = False
                if self.saver:
                    self._note(self.saver.poll())
                if trainer.stopping or trainer.skipped.too_many:
                    break
        trainer.optimizer.wait()
        self.reporter.write_steps()
        return done

    def _say_moves(self) -> None:
        if self.trainer.places and (said := self.trainer.places.take_said()):
            self.reporter.say(said)

    def _call_back(self, record: dict[str, float]) -> None:
        for callback in self.callbacks:
            callback(self.trainer, record)
        if self.callbacks:
            self.trainer.agree_to_stop()

    def _stop(self, done: int) -> None:
        """Save and report a run that was asked to stop after step `done`."""
        if self.saver and self.trainer.skipped.in_a_row:  # the weights may be the reason: remove no earlier checkpoint
            self.saver.keep = 0
        self._start_save(done)
        text = f"stopped after step {done}"
        if saved := self._last_checkpoint():
            resume = self.reporter.how_to_resume(saved, self.config.steps if done < self.config.steps else 2 * done)
            text += f", saved {printable(saved)}, to resume: {resume}"
        self.reporter.say(text)

    def _finish(self, before: float | None) -> None:
        """before: the validation loss before the run; None without validation."""
        trainer, reporter, steps, text = self.trainer, self.reporter, self.config.steps, self.plan.text
        trainer.stop.completes = "the last checkpoint"
        trainer.check_replicas()
        after = None
        if before is not None:
            after = self._validation_loss(f"after step {steps}", f"; this step is not saved: {_ADVICE}")
        if self.plan.first_step < steps:
            self._start_save(steps)
        if after is not None:
            reporter.metrics.write(step=steps, validation_loss=after)
        if profile := self.profiler.report():
            reporter.say(profile)
        reporter.say(f"peak memory: {trainer.largest(peak_memory_mb(trainer.device)):,.0f} MB on the fullest rank")
        if trainer.device.type == "cuda":
            reporter.say(trainer.pipeline.gpu_choices())
        if self.config.sample.sample_tokens and not trainer.stopping:
            reporter.sample(self.config.sample.prompt + trainer.sample())
        if saved := self._last_checkpoint():
            reporter.say(f"saved {printable(saved)}")
            self._export(saved)
            reporter.say(f"to resume: {reporter.how_to_resume(saved, 2 * steps)}")
        if before is not None and after is not None:
            reporter.say(f"validation loss {text.format_losses(before, after)}")

    def _export(self, checkpoint: Path) -> None:
        """Write the model of a checkpoint in Hugging Face's format, if wanted. All ranks write parts of it."""
        if not (folder := self.config.checkpoint.export):
            return
        try:
            with self.trainer.progress.during(SAVING):
                if storage.url_of(checkpoint) is not None:  # its local files were removed after the upload
                    checkpoint = find_checkpoint(str(checkpoint))
                plan = plan_checkpoint_export(checkpoint)
                plan.write(store_run.folder_of(store_run.location(folder), self.config.checkpoint.staging))
        except (ValueError, OSError) as error:
            self.reporter.fail(f"--export {printable(folder)}: {error}")
        self.reporter.say(
            f"exported {printable(folder)}: {plan.layout.architecture.model_type}, {plan.num_bytes / 1e6:,.1f} MB"
        )

    def _record_validation(self, done: int) -> None:
        loss = self._validation_loss(f"after step {done}", f"; this step is not saved: {_ADVICE}")
        self.reporter.write_steps()
        self.reporter.metrics.write(step=done, validation_loss=loss)

    def _validation_loss(self, when: str, consequence: str = "") -> float:
        loss = self.trainer.validation_loss()
        if not math.isfinite(loss):
            cause = first_nonfinite(self.trainer, self.trainer.validation_losses(), backward=False)
            self.reporter.fail(f"the validation loss {when} is {loss}: {cause}{consequence}")
        return loss

    def _check_skipped(self, done: int) -> None:
        """End the run if too many steps were skipped, or all of them."""
        steps, skipped = done - self.plan.first_step, self.trainer.skipped
        if skipped.too_many:
            what = f"{skipped.in_a_row} consecutive steps"
        elif steps and skipped.in_a_row == steps:
            what = f"all steps of the run ({steps})"
        else:
            return
        again = (self.trainer.training_losses(step) for step in [done - 1])
        cause = first_nonfinite(self.trainer, again, backward=True)
        consequence = f"the run stops without a checkpoint: {_ADVICE}"
        self.reporter.fail(f"{what} had a non-finite loss or gradient: {cause}; {consequence}")

    def _start_save(self, step: int) -> None:
        """Wait until the last checkpoint is written, then start to write the one of `step`.

        It stores one replica of each parameter, so they are compared before.
        """
        self.trainer.check_replicas()
        self.reporter.write_steps()
        if self.saver is None:
            return
        if self.saver.busy:
            self.reporter.say(f"step {step}: waiting for the last checkpoint, which is still being written")
        with self.trainer.progress.during(SAVING):
            self._note(self.saver.wait())
            files = tokenizer_files(self.plan.text.tokenizer) | companion_files(self.plan.companions)
            files |= self.trainer.balance.take_loads_file()
            self.saver.start(step, self.trainer.state(), files)

    def _note(self, result: SaveResult | None) -> None:
        if result:
            self.last_save = result
            self.reporter.saved(result)

    def _last_checkpoint(self) -> Path | None:
        """Wait for the last save and return its folder; None without a folder. Raises RunFailed if it failed."""
        if self.saver is None:
            return None
        with self.trainer.progress.during(SAVING):
            self._note(self.saver.wait())
        if self.last_save is None:  # a restart after the last step
            assert self.plan.resume is not None
            return self.plan.resume
        if self.last_save.error:
            raise RunFailed(f"{self.last_save.path} could not be written: {self.last_save.error}")  # reported already
        return self.last_save.path
