"""The loop of a training run: steps, validation, checkpoints and reports, up to the final checkpoint."""

import math
from collections.abc import Callable, Sequence
from contextlib import chdir, closing
from typing import Any

from ..messages import printable, quoted
from .console import Console
from .metrics import Sink, peak_memory_mb
from .saving import Saving
from .step import Trainer

Callback = Callable[[Trainer, dict[str, float]], object]
_ADVICE = "resume from an earlier one with a lower --lr, or check the data"


def train_loop(
    trainer: Trainer, sinks: Sequence[Sink] = (), callbacks: Sequence[Callback] = (), verbose: bool = True
) -> bool:
    """Train until the last step or a request to stop. Returns whether the run was stopped. Collective.

    sinks: also get the metrics, on the first rank. callbacks: called as `callback(trainer, record)` after each step on
    every rank, before the record is written. verbose: False prints nothing.

    Raises RunFailed, which exits with code 1, if the final checkpoint was not written, or if the run did not give a
    model with a finite loss.
    """
    trainer.wait_for_weights = bool(callbacks)  # they may read weights
    config, run = trainer.config, trainer.run
    with closing(Console(run, sinks, verbose)) as console, closing(Saving(trainer, console)) as saving:
        _introduce(trainer, console)
        before = _validate(trainer, console, run.start.first_step) if run.text.has_held_out else None
        trainer.stop.completes = "this step and a checkpoint"
        save_due = eval_due = False
        done = run.start.first_step
        for step in range(done, config.steps):
            update = trainer.step(step)
            if callbacks:
                _call(callbacks, trainer, update.record)
            console.step(update.record, update.notes)
            done = step + 1
            save_due |= _due(config.checkpoint.save_every, done)
            eval_due |= _due(config.metrics.eval_every, done)
            # After a skipped step, the weights are as before and may be the reason: wait for an update.
            alone = any(extension.exclusive for extension in trainer.extensions)
            ready = done < config.steps and not (trainer.stopping or trainer.skipped.in_a_row or alone)
            if eval_due and ready:
                _validate(trainer, console, done)  # before the save: a checkpoint has a finite validation loss
                eval_due = False
            if save_due and ready:
                saving.start(done)
                save_due = False
            saving.poll(wait=alone)
            if trainer.stopping or trainer.skipped.too_many:
                break
        trainer.optimizer.wait()
        console.end_of_steps()
        _check_skipped(trainer, console, done)
        if done < config.steps or trainer.stopping:
            _stop(trainer, console, saving, done)
        else:
            _finish(trainer, console, saving, before)
        return done < config.steps


def _call(callbacks: Sequence[Callback], trainer: Trainer, record: dict[str, float]) -> None:
    """Call the callbacks. Whatever they change is undone: the working directory, gradients and expert loads.

    They may add numbers to `record`. Raises TypeError for anything else, and RuntimeError for sys.exit.
    """
    before = {**record}
    for callback in callbacks:
        with chdir("."):
            try:
                callback(trainer, record)
            except SystemExit:
                raise RuntimeError("a callback must not end its process: use trainer.request_stop()") from None
    if removed := [key for key in before if key not in record]:
        raise ValueError(f"a callback must not remove record[{removed[0]!r}]")
    if record["step"] != before["step"]:
        was, got = before["step"], quoted(record["step"], 60)
        raise ValueError(f"a callback must not change record['step']: it was {was}, and is {got}")
    values: dict[Any, Any] = {**record}
    for key, value in values.items():
        number = value.item() if getattr(value, "ndim", None) == 0 else value  # of torch or numpy
        if not isinstance(number, int | float) or not isinstance(key, str):
            got = f"{type(value).__name__} {quoted(value, 60)}"
            raise TypeError(f"a callback may only add numbers to the record, by name: {quoted(key, 60)} is {got}")
        record[key] = number
    record["step"] = before["step"]  # not 1.0
    trainer.optimizer.drop_gradients()
    trainer.balance.forget()
    trainer.agree_to_stop()


def _due(every: int | None, done: int) -> bool:
    return bool(every and done % every == 0)


def _introduce(trainer: Trainer, console: Console) -> None:
    for change in trainer.run.start.changes:
        console.say(f"changed: {change}")
    state_mb = trainer.largest(trainer.optimizer.state_bytes / 2**20)
    console.introduce(*trainer.count_parameters(), state_mb)
    if trainer.layout.ep > 1:
        console.say(str(trainer.pipeline.expert_parallel))
    if trainer.partial:
        console.loaded(trainer.partial)
    trainer.check_replicas()


def _validate(trainer: Trainer, console: Console, done: int) -> float:
    """The validation loss after `done` steps, which is also recorded. Ends the run if it is not finite."""
    loss = trainer.validation_loss()
    first = done == trainer.first_step
    if not math.isfinite(loss):
        when = f"before step {done + 1}" if first else f"after step {done}"
        cause = trainer.run.instruments.first_nonfinite(trainer, trainer.validation_losses(), False)
        consequence = "" if first else f"; this step is not saved: {_ADVICE}"
        console.fail(f"the validation loss {when} is {loss}: {cause}{consequence}")
    console.write_steps()
    console.metrics.write(step=done, validation_loss=loss)
    if first:
        console.say(f"validation loss before: {trainer.text.format_losses(loss)}")
    return loss


def _check_skipped(trainer: Trainer, console: Console, done: int) -> None:
    """End the run if too many steps were skipped, or all of them."""
    steps, skipped = done - trainer.first_step, trainer.skipped
    if skipped.too_many:
        what = f"{skipped.in_a_row} consecutive steps"
    elif steps and skipped.in_a_row == steps:
        what = f"all steps of the run ({steps})"
    else:
        return
    again = (trainer.training_losses(step) for step in [done - 1])
    cause = trainer.run.instruments.first_nonfinite(trainer, again, True)
    consequence = f"the run stops without a checkpoint: {_ADVICE}"
    console.fail(f"{what} had a non-finite loss or gradient: {cause}; {consequence}")


def _stop(trainer: Trainer, console: Console, saving: Saving, done: int) -> None:
    """Save and report a run that was asked to stop after step `done`."""
    if trainer.skipped.in_a_row:  # the weights may be the reason
        saving.keep_all()
    saving.start(done)
    text, steps = f"stopped after step {done}", trainer.config.steps
    if saved := saving.finished():
        resume = console.how_to_resume(steps if done < steps else 2 * done)
        text += f", saved {printable(saved)}, to resume: {resume}"
    console.say(text)


def _finish(trainer: Trainer, console: Console, saving: Saving, before: float | None) -> None:
    """before: the validation loss before the run; None without validation."""
    config, text = trainer.config, trainer.text
    trainer.stop.completes = "the last checkpoint"
    trainer.check_replicas()
    after = None
    if before is not None:
        after = _validate(trainer, console, config.steps) if trainer.first_step < config.steps else before
    if trainer.first_step < config.steps:
        saving.start(config.steps)
    if loads := trainer.balancing.describe():
        console.say(loads)
    if config.lora.rank:
        updates = ", ".join(f"{kind} {size:.2%}" for kind, size in trainer.relative_updates().items())
        console.say(f"adapters, relative to the weights that they adapt: {updates}")
    peak = trainer.largest(peak_memory_mb(trainer.device))
    console.say(f"peak memory: {peak:,.0f} MB of the whole process, on the rank that needs the most")
    if trainer.device.type == "cuda":
        console.say(trainer.pipeline.gpu_choices())
    trainer.agree_to_stop()  # a rank may have been asked to during the validation
    if config.sample.sample_tokens and not trainer.stopping:
        console.sample(config.sample.prompt + trainer.sample())
    if saved := saving.finished():
        console.say(f"saved {printable(saved)}")
        saving.export(saved)
        console.say(f"to resume: {console.how_to_resume(2 * config.steps)}")
    if before is not None and after is not None:
        console.say(f"validation loss {text.format_losses(before, after)}")
