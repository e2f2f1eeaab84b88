"""The account of a device: at each moment exactly one entry, found again moment by moment."""

import random
from itertools import pairwise

import numpy as np
import pytest

from moe_dualpipe.tools.profiler import NAMES
from moe_dualpipe.tools.profiler.account import (
    ALLOCATING,
    CHECKPOINT,
    COMPUTATION,
    COPY,
    LAUNCHING,
    LOADER,
    OPTIMIZER,
    PYTHON,
    QUEUED,
    SYNCHRONIZING,
    TRANSFER,
    UNKNOWN,
    WAITING,
    Entry,
    account,
    relabeled,
)  # fmt: skip
from moe_dualpipe.tools.profiler.host import as_device
from moe_dualpipe.tools.profiler.trace import DeviceEvent, HostEvent, Trace

MAIN, OTHER = ("9", "1"), ("9", "2")
CALLS = {
    "cudaLaunchKernel": LAUNCHING, "cudaMalloc": ALLOCATING, "cudaStreamSynchronize": SYNCHRONIZING,
    "cudaMemcpy": SYNCHRONIZING, "cudaMemcpyAsync": LAUNCHING,
}  # fmt: skip
ANNOTATIONS = {
    "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__": LOADER, "save checkpoint": CHECKPOINT,
    "Optimizer.step#AdamW.step": OPTIMIZER, "forward": None,
}  # fmt: skip
KERNELS = {"gemm": COMPUTATION, "Memcpy HtoD (Pageable -> Device)": COPY, "ncclDevKernel_AllReduce": TRANSFER}


def random_trace(seed: int) -> Trace:
    """Events on three streams and calls on two threads, all at random times: integers, so that many coincide."""
    rng = random.Random(seed)
    trace = Trace()
    for number in range(rng.randint(1, 30)):
        start, length = rng.randint(0, 150), rng.choice([0, 1, 3, 10, 25])
        name = rng.choice([*KERNELS])
        category = "gpu_memcpy" if KERNELS[name] == COPY else "kernel"
        trace.device_events.append(
            DeviceEvent(name, category, start, start + length, "0", str(rng.randint(0, 2)), number, 1)
        )
        if rng.random() < 0.8:
            at = max(-20, start - rng.randint(0, 40))
            trace.launches[number] = HostEvent("cudaLaunchKernel", at, at + rng.randint(0, 5), MAIN)
    for number in range(100, 100 + rng.randint(0, 12)):
        name, start = rng.choice([*CALLS]), rng.randint(0, 150)
        trace.launches[number] = HostEvent(name, start, start + rng.randint(1, 12), rng.choice([MAIN, MAIN, OTHER]))
    for _ in range(rng.randint(0, 5)):
        start = rng.randint(0, 150)
        thread = rng.choice([MAIN, MAIN, OTHER])
        trace.annotations.append(HostEvent(rng.choice([*ANNOTATIONS]), start, start + rng.randint(1, 30), thread))
    return trace


def entry_at(entries, moment):
    return next((entry for entry in entries if entry.start_us <= moment < entry.end_us), None)


def kind_at(trace: Trace, moment: float) -> str:
    """The definition, for one moment."""

    def inside(events, *kinds, by):
        return [kind for kind in kinds for e in events if by.get(e.name) == kind and e.start <= moment < e.end]

    if running := inside(trace.device_events, COMPUTATION, COPY, TRANSFER, by=KERNELS):
        return running[0]
    ahead = [event for event in trace.device_events if moment < event.start < event.end]
    following = min(ahead, key=lambda event: event.start)
    launch = trace.launch_of(following)
    if launch is None:
        return UNKNOWN
    if launch.end <= moment:
        return QUEUED
    calls = [call for call in trace.launches.values() if call.thread == MAIN]
    annotations = [one for one in trace.annotations if one.thread == MAIN]
    found = inside(calls, SYNCHRONIZING, ALLOCATING, by=CALLS)
    found += inside(annotations, LOADER, CHECKPOINT, OPTIMIZER, by=ANNOTATIONS)
    return [*found, *inside(calls, LAUNCHING, by=CALLS), PYTHON][0]


@pytest.mark.parametrize("seed", range(60))
def test_each_moment_has_the_entry_of_its_definition(seed):
    trace = random_trace(seed)
    entries = account(as_device(trace, NAMES))
    spans = [(event.start, event.end) for event in trace.device_events if event.start < event.end]
    assert bool(entries) == bool(spans)
    if not entries:
        return
    start, end = min(start for start, _ in spans), max(end for _, end in spans)
    assert (entries[0].start_us, entries[-1].end_us) == (start, end)
    assert all(a.end_us == b.start_us and a.us > 0 for a, b in pairwise(entries))
    for moment in np.arange(start, end) + 0.5:
        assert entry_at(entries, moment).kind == kind_at(trace, moment), moment


@pytest.mark.parametrize("seed", range(30))
def test_relabeled_entries_change_inside_the_spans_alone(seed):
    rng = random.Random(seed)
    entries = [
        Entry(a, b, rng.choice([TRANSFER, COMPUTATION]), "x") for a, b in pairwise(sorted(rng.sample(range(100), 21)))
    ]
    cuts = sorted(rng.sample(range(-5, 110), 12))
    spans = [Entry(a, b, WAITING, f"rank {a}") for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
    found = relabeled(entries, spans, [TRANSFER])
    assert all(a.end_us == b.start_us for a, b in pairwise(found))
    for moment in np.arange(entries[0].start_us, entries[-1].end_us) + 0.5:
        before, span = entry_at(entries, moment), entry_at(spans, moment)
        kind, detail = (span.kind, f"{span.detail}, x") if span and before.kind == TRANSFER else (before.kind, "x")
        now = entry_at(found, moment)
        assert (now.kind, now.detail) == (kind, detail)


def test_the_computation_after_a_transfer_is_not_its_unpacking():
    trace = Trace(annotations=[HostEvent("dispatch(F) 3", 0, 9, MAIN), HostEvent("mlp(F)", 10, 19, MAIN)])
    for number, (name, start, end) in enumerate([("nccl", 20, 40), ("unpack", 40, 42), ("gemm", 42, 50)]):
        trace.device_events.append(DeviceEvent(name, "kernel", start, end, "0", name[0], number, 1))
        trace.launches[number] = HostEvent("cudaLaunchKernel", 2 + 5 * number, 4 + 5 * number, MAIN)
    assert [entry.detail for entry in account(as_device(trace, NAMES))] == [
        "dispatch(F) * before mlp(F)", "data movement in dispatch(F) *", "GEMM in mlp(F)",
    ]  # fmt: skip
