"""Train from Python as train.py does, but without a command line, signal handlers or, by default, files."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from ..data import Batches
from ..health.heartbeat import Progress
from ..runtime.launch import Launch
from ..runtime.world import current_launch, joined
from . import restart
from .agreement import agree
from .config import TrainConfig
from .from_options import build_run, watched_world
from .loop import Callback, TrainingRun
from .plan import Given, RunPlan, plan_run
from .reporter import RunFailed
from .sinks import Sink
from .trainer import Trainer


def train(
    config: TrainConfig | None = None, callbacks: Sequence[Callback] = (), log: Sequence[Sink] = (),
    verbose: bool = True, *, weights: Mapping[str, Tensor] | None = None, batches: Batches | None = None,
    validation: tuple[Tensor, Tensor] | None = None,
) -> Trainer:  # fmt: skip
    """Train with the options of train.py, and return the trainer with the trained model. Collective under torchrun.

    config: the options; None: all defaults. Without `CheckpointConfig(out=...)`, no file is written.
    callbacks: each is called as `callback(trainer, record)` after every step, on all ranks. record: the step's metrics,
    as in metrics.jsonl; entries that a callback adds are logged, too. A callback may call `trainer.request_stop()` on
    any rank, and `trainer.validation_loss()` and `trainer.sample()` on all ranks; and it may set `trainer.lr_factor`.
    log: objects with a method `log(dict)`. On the first rank, they receive the same records and the validation losses.
    verbose: print what train.py prints, and a progress bar.
    weights: the weights to start from: the state dict of a whole model (`build_model(config.model)`), or tensors by the
    names in checkpoints. Every rank gets all of them, and copies those that it holds.
    batches: called as `batches(step)` with the number of steps before, on every rank. Returns inputs and labels of the
    whole step, token ids [B, S] for micro-batches x micro-batch size x data-parallel ranks = B sequences. The run
    then reads no text: `config.batch.data` has no effect, and the run prints no sample. Labels of -100 are ignored.
    validation: with `batches`, inputs and labels [N, S] for the validation loss; None: no validation. N is a multiple
    of B.

    Under torchrun, `train` creates the default process group of torch.distributed, and destroys it at the end. A group
    that already exists is used and kept. With several processes, the returned trainer works only while the group
    exists, as inside `with join_world():`.

    Raises ValueError for invalid options, before the first step, and for batches of another shape. Raises RuntimeError
    if the loss does not stay finite, or if the last checkpoint cannot be written.
    """
    config, launch = config or TrainConfig(), current_launch()
    if config.parallel.elastic and dist.is_initialized():
        raise ValueError("ParallelConfig(elastic=...) needs torchrun: the program has its own process group")
    plan = plan_run(config, launch, None, Given(weights, batches, validation), agree(config, launch))
    if plan.setup.folder:
        restart.mark_folder(plan.setup.folder, launch.local_rank)
    invalid: ValueError | None = None
    try:
        with _world(plan, launch) as (plan, progress):
            try:
                trainer, sinks = build_run(plan, launch, progress)
            except ValueError as error:  # raised on all ranks: if it left the context, the processes would end
                invalid = error
            else:
                TrainingRun(trainer, [*sinks, *log], callbacks, verbose).run()
                return trainer
    except RunFailed as error:
        raise RuntimeError(error.text) from None
    assert invalid is not None
    raise invalid


@contextmanager
def _world(plan: RunPlan, launch: Launch) -> Iterator[tuple[RunPlan, Progress]]:
    """Join the other ranks and watch them. A single process, or a group that the program created, is not watched."""
    if dist.is_initialized() or launch.world_size == 1:
        with joined(plan.setup.device, launch, plan.config.health.timeout):
            yield plan, Progress()
        return
    with watched_world(plan, launch) as placed:
        yield placed
