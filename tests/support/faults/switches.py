"""Faults: each makes a healthy job worse in one known way, at two strengths.

Two faults of `TRAINING` can be combined, because each changes another part of the same job.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, groupby

from .jobs import decode, moe_training, pipeline, sequential_moe
from .program import Collective, Graph, Item, Job, Kernel, Op, Record

STRENGTHS = 1, 2


@dataclass(frozen=True, slots=True)
class Fault:
    """kind: the verdict that must name it. known: whether the time without the fault is known."""

    name: str
    kind: str
    apply: Callable[[Job, int], Job]
    healthy: Callable[..., Job] = moe_training
    known: bool = True


def _edited(job: Job, edit: Callable[[int, Op], Op | tuple[Op, ...]]) -> Job:
    """The job with each operation replaced by what `edit` returns for its rank and itself."""

    def ops(rank: int) -> Iterator[Op]:
        for op in job.programs[rank]:
            edited = edit(rank, op)
            yield from edited if isinstance(edited, tuple) else (edited,)

    return replace(job, programs={rank: tuple(ops(rank)) for rank in job.programs})


# ---- the host ----


def host_sync(job: Job, strength: int) -> Job:
    """The host reads a number from the device after a segment."""
    chosen = {1: ("mlp(F)",), 2: ("mlp(F)", "mlp(B)", "attn(B)")}[strength]

    def ops(program: tuple[Op, ...]) -> Iterator[Op]:
        for segment, group in groupby(program, lambda op: op.segment if isinstance(op, Kernel) else ""):
            yield from group
            if segment in chosen:
                yield Item(segment=segment)

    return replace(job, programs={rank: tuple(ops(program)) for rank, program in job.programs.items()})


def slow_host(job: Job, strength: int) -> Job:
    return job.on(call_us=40.0 * (1 + strength), launch_us=10.0)


def read_tokens(job: Job, strength: int) -> Job:
    """The host reads each token before it launches the next one."""
    machine = job.on(call_us=job.machine.call_us * 8 * strength)
    return _edited(machine, lambda _, op: (op, Item()) if isinstance(op, Graph) else op)


def without_graphs(job: Job, strength: int) -> Job:
    return decode(job.seed, graphs=False).on(call_us=6.0 * strength)


# ---- streams, queues and order ----


def one_queue(job: Job, strength: int) -> Job:
    return job.on(queues=3 - strength)


def shared_stream(job: Job, strength: int) -> Job:
    """Sums of gradients on the stream of the experts' transfers: of every other layer, or of all."""

    def edit(_: int, op: Op) -> Op:
        if not isinstance(op, Collective) or op.kind != "all_reduce":
            return op
        layer = int(op.key.partition(".")[2].split()[0])
        return replace(op, stream="experts") if strength == 2 or layer % 2 else op

    return _edited(job, edit)


def late_launch(job: Job, strength: int) -> Job:
    """The dispatch of the forward is launched, and takes its place in the streams, after a later segment: in every
    other layer, or in all."""

    def ops(program: tuple[Op, ...]) -> Iterator[Op]:
        held: list[Collective] = []
        seen = 0
        for op in program:
            if isinstance(op, Collective) and op.key.startswith("dispatch(F)"):
                seen += 1
                if strength == 2 or seen % 2:
                    held.append(op)
                    continue
            yield op
            if isinstance(op, Record) and op.mark.startswith("mlp(W)"):
                for late in held:
                    yield replace(late, after=op.mark)
                held.clear()

    return replace(job, programs={rank: tuple(ops(program)) for rank, program in job.programs.items()})


# ---- ranks ----


def slow_rank(job: Job, strength: int) -> Job:
    last, factor = max(job.programs), 1 + 0.15 * strength

    def edit(rank: int, op: Op) -> Op:
        return replace(op, us=op.us * factor) if rank == last and isinstance(op, Kernel) else op

    return _edited(job, edit)


def more_tokens(job: Job, strength: int) -> Job:
    """The experts of the last rank receive more tokens than the others."""
    last, factor = max(job.programs), 1 + 0.4 * strength

    def edit(rank: int, op: Op) -> Op:
        if rank == last and isinstance(op, Kernel) and op.segment.startswith("mlp("):
            return replace(op, us=op.us * factor)
        if rank == last and isinstance(op, Collective) and op.kind == "all_to_allv":
            return replace(op, elements=int(op.elements * factor))
        return op

    return _edited(job, edit)


# ---- transfers ----


def slow_link(job: Job, strength: int) -> Job:
    """Some transfers of the experts take three times as long."""
    share = 0.25 * strength

    def edit(_: int, op: Op) -> Op:
        if isinstance(op, Collective) and op.kind == "all_to_allv" and random.Random(op.key).random() < share:
            return replace(op, us=3 * op.us)
        return op

    return _edited(job, edit)


def starved_transfers(job: Job, strength: int) -> Job:
    return job.on(slower_beside_computation=0.6 * strength)


def starved_computation(job: Job, strength: int) -> Job:
    return job.on(slower_beside_transfers=0.25 * strength)


def late_receives(job: Job, strength: int) -> Job:
    return pipeline(job.seed, ahead=1, transfer_us=120.0 * strength, foreign=job.foreign)


TRAINING = (
    Fault("host sync", "host-sync", host_sync),
    Fault("slow host", "host-bound", slow_host),
    Fault("one queue", "few-queues", one_queue),
    Fault("shared stream", "shared-stream", shared_stream),
    Fault("late launch", "late-launch", late_launch),
    Fault("slow rank", "imbalance", slow_rank),
    Fault("more tokens", "imbalance", more_tokens),
    Fault("slow link", "slow-transfer", slow_link),
    Fault("starved transfers", "starved-transfer", starved_transfers),
    Fault("starved computation", "starved-computation", starved_computation),
)
OTHERS = (
    Fault("token by token", "host-sync", read_tokens, decode),
    Fault("no graphs", "host-bound", without_graphs, decode),
    Fault("late receives", "exposed-pipeline", late_receives, pipeline),
    Fault("one chunk", "nothing-to-overlap", sequential_moe, moe_training, known=False),
)
FAULTS = {fault.name: fault for fault in (*TRAINING, *OTHERS)}
PAIRS = [(one, other) for one, other in combinations(TRAINING, 2) if one.kind != other.kind]
