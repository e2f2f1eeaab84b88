"""The peak memory of a planned run."""

from functools import lru_cache

from ...schedule import Schedule, build
from .activations import MicroBatch
from .peak import PeakMemory, peak_memory, stages_of
from .workload import Workload


def memory_of(load: Workload) -> PeakMemory:
    """The memory of the fullest rank, by parts."""
    one = load.layout
    batch = MicroBatch(
        load.micro_batch, load.seq, ep=one.ep * load.expert_tp, recompute=load.recompute, tp=one.tp, cp=one.cp,
        flash=load.attention != "plain", load=load.loads.fullest(load.shape, one.ep) if load.loads else 1.0,
    )  # fmt: skip
    schedule = full_schedule(load.schedule, one.pp, load.num_micro_batches, one.chunks)
    stages = stages_of(load.shape, load.placement.num_stages)
    ranks = peak_memory(load.shape, schedule, batch, one.dp, load.precision, load.zero, stages=stages)
    return max(ranks, key=lambda rank: rank.total)


@lru_cache(maxsize=512)
def full_schedule(name: str, pp: int, num_micro_batches: int, chunks: int | None = None) -> Schedule:
    """A schedule of at most so many micro-batches, with the peak memory of that many: once the pipeline is full, a
    rank holds no more. gpipe holds them all.
    """
    if name == "gpipe":
        return build(name, pp, num_micro_batches)
    for number in (num_micro_batches, 2 * pp):
        try:
            return build(name, pp, min(number, 3 * pp), chunks)
        except ValueError:
            continue  # it cannot run this number
    return build(name, pp, 4 * pp, chunks)
