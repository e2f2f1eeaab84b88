"""Do a training run from beginning to end: `run` for the command train.py, `train` for Python programs."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import lcm

import torch
import torch.distributed as dist
from torch import Tensor

from ..data import Batches
from ..data.files import replace_file
from ..health.heartbeat import Progress
from ..health.report import Deadline, exit_on_invalid_option, program_name, report_error, warn
from ..health.signals import Stop
from ..health.watch import PATIENCE, joining, watch_ranks
from ..messages import printable
from ..runtime.groups import init_world, leave_store, leave_world
from ..runtime.launch import Launch
from ..runtime.shared_errors import build_on_all_ranks
from ..runtime.topology import OtherVersionsError, place
from ..runtime.world import current_launch, joined
from . import restart
from .config import TrainConfig
from .console import RunFailed
from .loop import Callback, train_loop
from .metrics import Sink, chosen_sinks
from .options import OPTIONS_FILE, Request, read_toml, saved_values, to_toml
from .resolve import NO_INSTRUMENTS, Instruments, Run, prepare
from .rules import Given
from .step import Trainer

LAUNCHER_SECONDS = 2.0
"""How long a stopped rank waits for the signal of its own launcher. torchrun looks for other machines every 0.1 s."""


def run(request: Request, launch: Launch, stop: Stop, instruments: Instruments = NO_INSTRUMENTS) -> None:
    """Do the run that was asked for. Invalid options print one line and exit with code 2. Collective.

    stop: receives the signals.
    """
    health = request.config.health
    first, full_traceback = launch.local_rank == 0, health.traceback
    several_machines = launch.world_size > launch.local_world_size
    with ExitStack() as stack:
        with exit_on_invalid_option(first, ValueError, OSError, full_traceback=full_traceback):
            plan = prepare(request, launch, instruments=instruments, stack=stack)
        with exit_on_invalid_option(first, OtherVersionsError), watched_world(plan, launch) as (plan, progress):
            with exit_on_invalid_option(first, ValueError, full_traceback=full_traceback):
                trainer, sinks = build(plan, launch, progress, stop)
            stopped = train_loop(trainer, sinks)
    if stopped and several_machines:
        _let_others_go_on(stop, plan.layout.rank)


def _let_others_go_on(stop: Stop, rank: int) -> None:
    """Exit with code 1 if only another machine leaves: after code 0, torchrun takes the run as complete everywhere."""
    stop.announce = False
    time.sleep(0.0 if stop.requested else LAUNCHER_SECONDS)
    if not stop.requested:
        why = "another machine is leaving; torchrun will restart the remaining ranks"
        report_error(f"{program_name()}: rank {rank} exits: {why}\n")
        raise SystemExit(1)


@torch.inference_mode(False)  # also inside torch.no_grad()
def train(
    config: TrainConfig | None = None, callbacks: Sequence[Callback] = (), log: Sequence[Sink] = (),
    verbose: bool = True, *, weights: Mapping[str, Tensor] | None = None, batches: Batches | None = None,
    validation: tuple[Tensor, Tensor] | None = None, instruments: Instruments = NO_INSTRUMENTS,
) -> Trainer:  # fmt: skip
    """Train with the options of train.py, and return the trainer with the trained model. Collective under torchrun.

    config: the options; None: all defaults. Without `CheckpointConfig(out=...)`, no file is written.
    callbacks: each is called as `callback(trainer, record)` after every step, on all ranks. record: the step's metrics,
    as in metrics.jsonl; entries that a callback adds are logged, too. A callback may call `trainer.request_stop()` on
    any rank, and `trainer.validation_loss()` and `trainer.sample()` on all ranks; and it may set `trainer.lr_factor`.
    log: objects with a method `log(dict)`. On the first rank, they receive the same records and the validation losses.
    verbose: print what train.py prints, and a progress bar.
    weights: the weights to start from: those of a whole model, `checkpoint.global_weights(build_model(config.model))`.
    Every rank gets all of them, and copies those that it holds.
    batches: called as `batches(step)` with the number of steps before, on every rank. Returns inputs and labels of the
    whole step, token ids [B, S] for `batch_size` = B sequences. The run then reads no text: `config.batch.data` has no
    effect, and the run prints no sample. Labels of -100 are ignored.
    validation: with `batches`, inputs and labels [N, S] for the validation loss; None: no validation. N is a multiple
    of B.
    instruments: what tools add to the run; `moe_dualpipe.train` passes those of train.py.

    Under torchrun, `train` creates the default process group of torch.distributed, and destroys it at the end. A group
    that already exists is used and kept. With several processes, the returned trainer works only while the group
    exists, as inside `with join_world():`. Call it from one thread at a time.

    Raises ValueError for invalid options, before the first step, and for batches of another shape. Raises RuntimeError
    if the loss does not stay finite, or if the last checkpoint cannot be written.
    """
    launch = current_launch()
    given = Given(weights, batches, validation)
    config = config or TrainConfig()
    request = Request(config, saved=saved_values(config.checkpoint.resume))
    invalid: ValueError | None = None
    try:
        with ExitStack() as stack:
            plan = prepare(request, launch, given, instruments, from_command=False, stack=stack)
            with _world(plan, launch) as (plan, progress):
                try:
                    trainer, sinks = build(plan, launch, progress)
                except ValueError as error:  # raised on all ranks: if it left the context, the processes would end
                    invalid = error
                else:
                    train_loop(trainer, [*sinks, *log], callbacks, verbose)
                    return trainer
    except RunFailed as error:
        raise RuntimeError(error.text) from None
    assert invalid is not None
    raise invalid


def build(
    plan: Run, launch: Launch, progress: Progress, stop: Stop | None = None
) -> tuple[Trainer, list[Sink]]:  # fmt: skip
    """Return the trainer, and the sinks that the options choose. Collective.

    Raises ValueError, on all ranks, for options that cannot work here. Then nothing was written into the folder.
    """
    trainer = Trainer(plan, progress, stop)
    folder = plan.folder if plan.layout.rank == 0 else None
    sinks = build_on_all_ranks(lambda: chosen_sinks(plan.config, folder, plan.start.first_step) if folder else [])
    build_on_all_ranks(lambda: _open_folder(plan, launch))
    return trainer, sinks


def _open_folder(plan: Run, launch: Launch) -> None:
    """Make the folder, mark it as one of this launcher, and write run.toml. Raises ValueError without folder or mark.

    A run that resumes in its own folder keeps the first `checkpoint.resume` in run.toml.
    """
    if plan.folder is None:
        return
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot create {printable(plan.folder)}: {error.strerror}") from None
    restart.mark_folder(plan.folder, launch.local_rank)
    if launch.local_rank == 0:
        file, config = plan.folder / OPTIONS_FILE, plan.config
        if plan.start.resume and plan.start.resume.is_relative_to(plan.folder):
            started = read_toml(file).get("checkpoint.resume") if file.is_file() else None
            config = replace(config, checkpoint=replace(config.checkpoint, resume=started))
        try:
            replace_file(file, to_toml(config).encode(errors="replace"))
        except OSError as error:  # a full disk does not end a run
            warn(
                f"{printable(file)} cannot be written: {error.strerror}; to resume, give the options of this run again"
            )


@contextmanager
def watched_world(plan: Run, launch: Launch) -> Iterator[tuple[Run, Progress]]:
    """Join the other ranks, and watch them (health/watch.py).

    Yields the run with this process's place among them, and what the main thread notes its progress in.
    """
    timeout, nodes = plan.config.health.timeout, plan.config.parallel.nodes_per_domain
    with joining(launch.rank, timeout):
        placed = place(launch, lcm(plan.layout.ep, plan.layout.cp), nodes, timeout, plan.store)
        if not placed.other_versions:
            init_world(plan.device, placed.launch, timeout, placed.store)
    if placed.other_versions:
        if placed.store is not None:
            leave_store(placed.store, launch.rank, launch.world_size, min(PATIENCE, timeout / 2))
        raise OtherVersionsError(placed.other_versions)
    try:
        with watch_ranks(timeout, full_traceback=plan.config.health.traceback) as progress:
            yield plan.placed(placed), progress
        leave_world(timeout=min(PATIENCE, timeout / 2))
    finally:
        with Deadline(timeout, f"rank {placed.launch.rank} stops: it cannot leave the process groups"):
            dist.destroy_process_group()


@contextmanager
def _world(plan: Run, launch: Launch) -> Iterator[tuple[Run, Progress]]:
    """Join the other ranks and watch them. A single process, or a group that the program created, is not watched."""
    if dist.is_initialized() or launch.world_size == 1:
        with joined(plan.device, launch, plan.config.health.timeout):
            yield plan, Progress()
        return
    with watched_world(plan, launch) as placed:
        yield placed
