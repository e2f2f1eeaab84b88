"""A training run: its options, the ranks that it joins, and the loop.

Every rank checks all options before the first collective operation, and all come to the same result. So an invalid
option ends the run with one line and exit code 2, and never with a hang.
"""

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from ..health.deadline import Deadline
from ..health.heartbeat import Progress
from ..health.signals import Stop
from ..health.watch import PATIENCE, joining, watch_ranks
from ..runtime.groups import init_world, leave_store, leave_world
from ..runtime.launch import Launch
from ..runtime.shared_errors import build_on_all_ranks
from ..runtime.topology import place
from ..runtime.versions import OtherVersionsError
from . import restart
from .agreement import agree
from .command_line import exit_on_invalid_option
from .config import TrainConfig
from .division import NoDivisionError
from .loop import TrainingRun
from .memory import check_memory
from .plan import RunPlan, plan_run
from .relaunch import end_after_stop, end_with_other_versions, end_without_division
from .sinks import Sink
from .trainer import Trainer
from .wandb_run import WandbRun


def run(config: TrainConfig, launch: Launch, arguments: Sequence[str], stop: Stop) -> None:
    """Do the run of `config`. Invalid options print one line and exit with code 2. Collective.

    arguments: the command line, for the command that resumes the run. stop: receives the signals.
    """
    first, full_traceback = launch.local_rank == 0, config.health.traceback
    elastic = config.parallel.elastic is not None
    try:
        with exit_on_invalid_option(first, ValueError, OSError, full_traceback=full_traceback):
            try:
                plan = plan_run(config, launch, arguments, agreed=agree(config, launch))
            except NoDivisionError as error:
                end_without_division(error, launch, config.health.timeout)
            assert plan.setup.folder is not None
            restart.mark_folder(plan.setup.folder, launch.local_rank)
        with watched_world(plan, launch) as (plan, progress):
            with exit_on_invalid_option(first, ValueError, full_traceback=full_traceback):
                trainer, sinks = build_run(plan, launch, progress, stop)
            training = TrainingRun(trainer, sinks)
            training.run()
    except OtherVersionsError as error:
        end_with_other_versions(error, socket.gethostname(), launch, elastic)
    if elastic and training.stopped:
        end_after_stop(stop, plan.setup.layout.rank)


@contextmanager
def watched_world(plan: RunPlan, launch: Launch) -> Iterator[tuple[RunPlan, Progress]]:
    """Join the other ranks, and watch them (health/watch.py).

    Yields the plan with this process's place among them, and what the main thread notes its progress in.
    """
    timeout, parallel = plan.config.health.timeout, plan.config.parallel
    with joining(launch.rank, timeout):
        store = plan.elastic.agreed.store if plan.elastic else None
        placed = place(launch, parallel.ep, parallel.nodes_per_domain, timeout, store)
        if not placed.other_versions:
            init_world(plan.setup.device, placed.launch, timeout, placed.store)
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


def build_run(
    plan: RunPlan, launch: Launch, progress: Progress, stop: Stop | None = None
) -> tuple[Trainer, list[Sink]]:
    """Return the trainer, and the sinks that the options choose. Collective.

    Raises ValueError, on all ranks, for options that cannot work here.
    """
    check_memory(plan, launch)
    trainer = Trainer(plan, progress, stop)
    return trainer, build_on_all_ranks(lambda: _chosen_sinks(plan))


def _chosen_sinks(plan: RunPlan) -> list[Sink]:
    """Raises ValueError for one that cannot start."""
    if plan.config.metrics.wandb and plan.setup.layout.rank == 0:
        assert plan.setup.folder is not None
        return [WandbRun(plan.config, plan.setup.folder)]
    return []
