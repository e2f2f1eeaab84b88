"""Faults: each makes a healthy job worse in one known way, at two strengths.

Two faults of `TRAINING` can be combined, because each changes another part of the same job.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, groupby

from .jobs import data_parallel, decode, moe_training, pipeline, sequential_moe, sharded, single_gpu
from .program import Await, Begin, Call, Collective, End, Graph, Item, Job, Kernel, Op, Python, Record

STRENGTHS = 1, 2


@dataclass(frozen=True, slots=True)
class Fault:
    """kind: the verdict that must name it. mended: the job without the fault, if that is not the healthy one; None if
    the time without the fault is unknown."""

    name: str
    kind: str
    apply: Callable[[Job, int], Job]
    healthy: Callable[..., Job] = moe_training
    mended: Callable[[Job, int], Job] | None = lambda job, _: job


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


def late_host(job: Job, strength: int) -> Job:
    """The host of the last rank does something else before each launch."""
    last = max(job.programs)
    return _edited(
        job, lambda rank, op: (Python(100.0 + 40 * strength), op) if rank == last and isinstance(op, Kernel) else op
    )


def item_on_one_rank(job: Job, strength: int) -> Job:
    last = max(job.programs)
    return replace(job, programs={**job.programs, last: host_sync(job, strength).programs[last]})


def loader(job: Job, strength: int) -> Job:
    """Each batch takes longer than the step before it."""
    waits = (
        Begin("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"),
        Python(16_000.0 + 4_000 * strength),
        End(),
    )
    return _edited(job, lambda _, op: (op, *waits) if isinstance(op, Begin) and op.what == "step" else op)


def allocator(job: Job, strength: int) -> Job:
    """The host releases and allocates memory before some segments, and waits for the device."""
    calls = Call("cudaFree", 200.0 * strength, waits=True), Call("cudaMalloc", 300.0 * strength)
    return _before_segments(job, "attn(F)", calls)


def checkpoint(job: Job, strength: int) -> Job:
    """Before the optimizer, the weights are copied and written."""
    saved = Begin("save checkpoint"), Call("cudaMemcpy", 500.0, waits=True), Python(2_000.0 * strength), End()
    return _before_segments(job, "optimizer", saved)


def many_small_updates(job: Job, strength: int) -> Job:
    return single_gpu(job.seed, small="alone").on(call_us=8.0 + 4 * strength)


def copies(job: Job, strength: int) -> Job:
    copy = Kernel("Memcpy HtoD (Pinned -> Device)", 150.0 * strength, category="gpu_memcpy")
    return _before_segments(job, "attn(F)", (copy,))


def memsets(job: Job, strength: int) -> Job:
    return _before_segments(job, "mlp(W)", (Kernel("Memset (Device)", 100.0 * strength, category="gpu_memset"),))


def _before_segments(job: Job, segment: str, inserted: tuple[Op, ...]) -> Job:
    def ops(program: tuple[Op, ...]) -> Iterator[Op]:
        before = ""
        for op in program:
            now = op.segment if isinstance(op, Kernel) else before
            if now == segment != before:
                yield from inserted
            before = now
            yield op

    return replace(job, programs={rank: tuple(ops(program)) for rank, program in job.programs.items()})


# ---- streams, queues and order ----


def early_wait(job: Job, strength: int) -> Job:
    """The attention of the forward waits for the combine of the backward, which it does not need: in every other layer
    or in all."""

    def ops(program: tuple[Op, ...]) -> Iterator[Op]:
        seen = 0
        sent = {op.key.split()[1] for op in program if isinstance(op, Collective) and op.key.startswith("combine(B)")}
        for op in program:
            yield op
            if isinstance(op, Await) and (found := re.match(r"done combine\(F\) (\d+)\.(\d+)( of .*)", op.mark)):
                seen += 1
                if (strength == 2 or seen % 2) and f"{found[1]}.{int(found[2]) + 1}" in sent:
                    yield Await(f"done combine(B) {found[1]}.{int(found[2]) + 1}{found[3]}")

    return replace(job, programs={rank: tuple(ops(program)) for rank, program in job.programs.items()})


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


def moving(job: Job, strength: int) -> Job:
    """In each layer, the kernels of another rank take longer."""

    def ops(rank: int) -> Iterator[Op]:
        layer = -1
        for op in job.programs[rank]:
            layer += isinstance(op, Record) and op.mark.startswith("attn(B)")
            if isinstance(op, Kernel) and layer % len(job.programs) == rank:
                op = replace(op, us=op.us * (1 + 0.25 * strength))
            yield op

    return replace(job, programs={rank: tuple(ops(rank)) for rank in job.programs})


def _slower(job: Job, factor: float) -> Job:
    return _edited(job, lambda _, op: replace(op, us=op.us * factor) if isinstance(op, Kernel) else op)


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


def small_messages(job: Job, strength: int) -> Job:
    """A sum for each weight in place of one for all weights of a bucket."""

    def edit(_: int, op: Op) -> Op | tuple[Op, ...]:
        if not isinstance(op, Collective):
            return op
        small = replace(op, elements=4000)
        return (*(replace(small, key=f"{op.key}.{i}") for i in range(40 * strength)), small)

    return _edited(job, edit)


def sum_at_end(job: Job, strength: int) -> Job:
    return data_parallel(job.seed, transfer_us=350.0 * strength, at_end=True)


def one_sum(job: Job, strength: int) -> Job:
    return data_parallel(job.seed, steps=1, transfer_us=350.0 * strength, at_end=True)


def without_prefetch(job: Job, strength: int) -> Job:
    return sharded(job.seed, prefetch=False, transfer_us=90.0 * strength)


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
    Fault(
        "starved transfers",
        "starved-transfer",
        starved_transfers,
        mended=lambda job, _: job.on(slower_beside_computation=0.0),
    ),
    Fault(
        "starved computation",
        "starved-computation",
        starved_computation,
        mended=lambda job, _: job.on(slower_beside_transfers=0.0),
    ),
)
OTHERS = (
    Fault("late host", "host-bound", late_host),
    Fault("item on one rank", "host-sync", item_on_one_rank),
    Fault("loader", "data-loader", loader, partial(data_parallel, steps=3)),
    Fault("allocator", "allocator", allocator),
    Fault("checkpoint", "checkpoint", checkpoint),
    Fault("many small updates", "slow-optimizer", many_small_updates, partial(single_gpu, small="together")),
    Fault("copies", "copies", copies),
    Fault("memsets", "memsets", memsets),
    Fault("early wait", "early-wait", early_wait),
    Fault("moving imbalance", "imbalance", moving, mended=lambda job, strength: _slower(job, 1 + 0.125 * strength)),
    Fault("small messages", "small-messages", small_messages, partial(data_parallel, transfer_us=40.0)),
    Fault(
        "sum at the end",
        "sum-at-end",
        sum_at_end,
        mended=lambda job, strength: data_parallel(job.seed, transfer_us=350.0 * strength),
    ),
    Fault(
        "one sum",
        "sum-at-end",
        one_sum,
        mended=lambda job, strength: data_parallel(job.seed, steps=1, transfer_us=350.0 * strength),
    ),
    Fault(
        "no prefetch",
        "exposed-weights",
        without_prefetch,
        mended=lambda job, strength: sharded(job.seed, transfer_us=90.0 * strength),
    ),
    Fault("token by token", "host-sync", read_tokens, decode),
    Fault("no graphs", "host-bound", without_graphs, decode),
    Fault("late receives", "exposed-pipeline", late_receives, pipeline),
    Fault("one chunk", "nothing-to-overlap", sequential_moe, mended=None),
)
FAULTS = {fault.name: fault for fault in (*TRAINING, *OTHERS)}
PAIRS = [(one, other) for one, other in combinations(TRAINING, 2) if one.kind != other.kind]
