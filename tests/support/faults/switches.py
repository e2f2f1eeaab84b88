"""Faults: each makes a healthy job worse in one known way, at two strengths. At the lower one, faults of layers concern
every other layer.

Two faults of `TRAINING` can be combined, because each changes another part of the same job.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, groupby
from typing import Any

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


def _rewritten(job: Job, ops: Callable[[int, tuple[Op, ...]], Iterable[Op]]) -> Job:
    return replace(job, programs={rank: tuple(ops(rank, program)) for rank, program in job.programs.items()})


def _edited(job: Job, edit: Callable[[int, Op], Op | tuple[Op, ...]]) -> Job:
    """The job with each operation replaced by what `edit` returns for its rank and itself."""

    def ops(rank: int, program: tuple[Any, ...]) -> Iterator[Op]:
        for op in program:
            edited = edit(rank, op)
            yield from edited if isinstance(edited, tuple) else (edited,)

    return _rewritten(job, ops)


def _slower(job: Job, factor: float, chosen: Callable[[int, Kernel], bool] = lambda *_: True) -> Job:
    """The kernels of all ranks or some take longer."""

    def edit(rank: int, op: Any) -> Op:
        return replace(op, us=op.us * factor) if isinstance(op, Kernel) and chosen(rank, op) else op

    return _edited(job, edit)


def _inserted(job: Job, segments: tuple[str, ...], ops: tuple[Op, ...], after: bool = False, rank: int = -1) -> Job:
    """Operations before or after some segments, of one rank or all."""

    def inserted(own: int, program: tuple[Any, ...]) -> Iterator[Op]:
        for segment, group in groupby(program, lambda op: op.segment if isinstance(op, Kernel) else ""):
            more = ops if segment in segments and rank in (own, -1) else ()
            yield from () if after else more
            yield from group
            yield from more if after else ()

    return _rewritten(job, inserted)


def _is_chosen(strength: int, mark: str) -> bool:
    """Whether a fault concerns the layer of a mark such as "dispatch(F) 0.3": every other one, or all."""
    return strength == 2 or int(mark.partition(".")[2].split()[0]) % 2 == 0


def _last(job: Job) -> int:
    return max(job.programs)


def host_sync(job: Job, strength: int, rank: int = -1) -> Job:
    """The host reads a number from the device after a segment."""
    return _inserted(job, ("mlp(F)", "mlp(B)", "attn(B)")[: 2 * strength - 1], (Item(),), after=True, rank=rank)


def late_host(job: Job, strength: int) -> Job:
    """The host of the last rank does something else before each launch."""
    busy, last = Python(100.0 + 40 * strength), _last(job)
    return _edited(job, lambda rank, op: (busy, op) if rank == last and isinstance(op, Kernel) else op)


def read_tokens(job: Job, strength: int) -> Job:
    """The host reads each token before it launches the next one."""
    machine = job.on(call_us=job.machine.call_us * 8 * strength)
    return _edited(machine, lambda _, op: (op, Item()) if isinstance(op, Graph) else op)


def loader(job: Job, strength: int) -> Job:
    """Each batch takes longer than the step before it."""
    load = Begin("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    waits = load, Python(16_000.0 + 4_000 * strength), End()
    return _edited(job, lambda _, op: (op, *waits) if isinstance(op, Begin) and op.what == "step" else op)


def allocator(job: Job, strength: int) -> Job:
    """The host releases and allocates memory before some segments, and waits for the device."""
    calls = Call("cudaFree", 200.0 * strength, waits=True), Call("cudaMalloc", 300.0 * strength)
    return _inserted(job, ("attn(F)",), calls)


def checkpoint(job: Job, strength: int) -> Job:
    """Before the optimizer, the weights are copied and written."""
    saved = Begin("save checkpoint"), Call("cudaMemcpy", 500.0, waits=True), Python(2_000.0 * strength), End()
    return _inserted(job, ("optimizer",), saved)


def copies(job: Job, strength: int) -> Job:
    copy = Kernel("Memcpy HtoD (Pinned -> Device)", 150.0 * strength, category="gpu_memcpy")
    return _inserted(job, ("attn(F)",), (copy,))


def memsets(job: Job, strength: int) -> Job:
    return _inserted(job, ("mlp(W)",), (Kernel("Memset (Device)", 100.0 * strength, category="gpu_memset"),))


def early_wait(job: Job, strength: int) -> Job:
    """The attention of the forward waits for the combine of the backward, which it does not need."""
    sent = {op.done for op in job.programs[0] if isinstance(op, Collective)}

    def edit(_: int, op: Any) -> Op | tuple[Op, ...]:
        found = re.match(r"done combine\(F\) (\d+)\.(\d+)( of .*)", op.mark) if isinstance(op, Await) else None
        other = f"done combine(B) {found[1]}.{int(found[2]) + 1}{found[3]}" if found else ""
        return (op, Await(other)) if other in sent and _is_chosen(strength, op.mark) else op

    return _edited(job, edit)


def late_launch(job: Job, strength: int) -> Job:
    """The dispatch of the forward is launched, and takes its place in the streams, after a later segment."""

    def ops(_: int, program: tuple[Any, ...]) -> Iterator[Op]:
        held: list[Collective] = []
        for op in program:
            if isinstance(op, Collective) and op.key.startswith("dispatch(F)") and _is_chosen(strength, op.key):
                held.append(op)
                continue
            yield op
            if isinstance(op, Record) and op.mark.startswith("mlp(W)"):
                yield from (replace(late, after=op.mark) for late in held)
                held.clear()

    return _rewritten(job, ops)


def moving(job: Job, strength: int) -> Job:
    """In each layer, the kernels of another rank take longer."""

    def ops(rank: int, program: tuple[Any, ...]) -> Iterator[Op]:
        layer = -1
        for op in program:
            layer += isinstance(op, Record) and op.mark.startswith("attn(B)")
            if isinstance(op, Kernel) and layer % len(job.programs) == rank:
                yield replace(op, us=op.us * (1 + 0.25 * strength))
            else:
                yield op

    return _rewritten(job, ops)


def more_tokens(job: Job, strength: int) -> Job:
    """The experts of the last rank receive more tokens than the others."""
    last, factor = _last(job), 1 + 0.4 * strength

    def edit(rank: int, op: Any) -> Op:
        more = rank == last and isinstance(op, Collective) and op.kind == "all_to_allv"
        return replace(op, elements=int(op.elements * factor)) if more else op

    return _slower(_edited(job, edit), factor, lambda rank, op: rank == last and op.segment.startswith("mlp("))


def slow_link(job: Job, strength: int) -> Job:
    """Some transfers of the experts take three times as long."""

    def edit(_: int, op: Any) -> Op:
        of_experts = isinstance(op, Collective) and op.kind == "all_to_allv"
        return replace(op, us=3 * op.us) if of_experts and random.Random(op.key).random() < 0.25 * strength else op

    return _edited(job, edit)


def small_messages(job: Job, strength: int) -> Job:
    """A sum for each weight in place of one for all weights of a bucket."""

    def edit(_: int, op: Any) -> Op | tuple[Op, ...]:
        keys = [*(f"{op.key}.{i}" for i in range(40 * strength)), op.key] if isinstance(op, Collective) else []
        return tuple(replace(op, key=key, elements=4000) for key in keys) or op

    return _edited(job, edit)


TRAINING = (
    Fault("host sync", "host-sync", host_sync),
    Fault("slow host", "host-bound", lambda job, s: job.on(call_us=40.0 * (1 + s), launch_us=10.0)),
    Fault("one queue", "few-queues", lambda job, s: job.on(queues=3 - s)),
    Fault("late launch", "late-launch", late_launch),
    Fault("slow rank", "imbalance", lambda job, s: _slower(job, 1 + 0.15 * s, lambda rank, _: rank == _last(job))),
    Fault("more tokens", "imbalance", more_tokens),
    Fault("slow link", "slow-transfer", slow_link),
    Fault(
        "starved transfers",
        "starved-transfer",
        lambda job, s: job.on(slower_beside_computation=0.6 * s),
        mended=lambda job, _: job.on(slower_beside_computation=0.0),
    ),
    Fault(
        "starved computation",
        "starved-computation",
        lambda job, s: job.on(slower_beside_transfers=0.25 * s),
        mended=lambda job, _: job.on(slower_beside_transfers=0.0),
    ),
)
OTHERS = (
    Fault("late host", "host-bound", late_host, partial(moe_training, layers=8)),
    Fault("item on one rank", "host-sync", lambda job, s: host_sync(job, s, _last(job))),
    Fault("loader", "data-loader", loader, partial(data_parallel, steps=3)),
    Fault("allocator", "allocator", allocator),
    Fault("checkpoint", "checkpoint", checkpoint),
    Fault(
        "many small updates",
        "slow-optimizer",
        lambda job, s: single_gpu(job.seed, steps=1, small="alone").on(call_us=8.0 + 4 * s),
        partial(single_gpu, steps=1, small="together"),
    ),
    Fault("copies", "copies", copies),
    Fault("memsets", "memsets", memsets),
    Fault("early wait", "early-wait", early_wait),
    Fault("moving imbalance", "imbalance", moving, mended=lambda job, s: _slower(job, 1 + 0.125 * s)),
    Fault("small messages", "small-messages", small_messages, partial(data_parallel, steps=1, transfer_us=40.0)),
    Fault(
        "sum at the end",
        "sum-at-end",
        lambda job, s: data_parallel(job.seed, transfer_us=350.0 * s, at_end=True),
        mended=lambda job, s: data_parallel(job.seed, transfer_us=350.0 * s),
    ),
    Fault(
        "one sum",
        "sum-at-end",
        lambda job, s: data_parallel(job.seed, steps=1, transfer_us=350.0 * s, at_end=True),
        mended=lambda job, s: data_parallel(job.seed, steps=1, transfer_us=350.0 * s),
    ),
    Fault(
        "no prefetch",
        "exposed-weights",
        lambda job, s: sharded(job.seed, prefetch=False, transfer_us=90.0 * s),
        mended=lambda job, s: sharded(job.seed, transfer_us=90.0 * s),
    ),
    Fault("token by token", "host-sync", read_tokens, decode),
    Fault("no graphs", "host-bound", lambda job, s: decode(job.seed, graphs=False).on(call_us=6.0 * s), decode),
    Fault(
        "late receives",
        "exposed-pipeline",
        lambda job, s: pipeline(job.seed, ahead=1, transfer_us=120.0 * s),
        pipeline,
    ),
    Fault(
        "one chunk",
        "nothing-to-overlap",
        lambda job, s: sequential_moe(job.seed, transfer_us=100 * s),
        mended=None,
    ),
)
FAULTS = {fault.name: fault for fault in (*TRAINING, *OTHERS)}
PAIRS = [(one, other) for one, other in combinations(TRAINING, 2) if one.kind != other.kind]
