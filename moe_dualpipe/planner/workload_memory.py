"""The peak memory of a planned run."""

from functools import partial

from ..schedule import Schedule, build
from .activations import MicroBatch
from .peak import PeakMemory, peak_memory
from .stages import stages_of
from .workload import Workload


def memory_of(load: Workload) -> PeakMemory:
    """The memory of the fullest rank, by parts."""
    one = load.division
    batch = MicroBatch(
        load.micro_batch, load.seq, ep=one.ep * one.expert_tp, recompute=load.recompute, tp=one.tp, cp=one.cp,
        flash=load.flash,
    )  # fmt: skip
    stages = stages_of(load.shape, load.placement.num_stages)
    loads = partial(load.loads.fullest, load.shape, one.ep) if load.loads and one.ep > 1 else None
    ranks = peak_memory(
        load.shape, full_schedule(load), batch, one.dp, load.precision, load.zero, stages=stages, loads=loads
    )
    return max(ranks, key=lambda rank: rank.total)


def full_schedule(load: Workload) -> Schedule:
    """The schedule with as many micro-batches as it takes to fill the pipeline, but not more than there are."""
    pp, chunks = load.division.pp, load.division.vpp if load.schedule == "interleaved_1f1b" else None
    for number in (load.num_micro_batches, 2 * pp):
        try:
            return build(load.schedule, pp, min(number, 3 * pp), chunks)
        except ValueError:
            continue  # it cannot run this number
    return build(load.schedule, pp, 4 * pp, chunks)
