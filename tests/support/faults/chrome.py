"""Write what a machine did as the Chrome traces that torch.profiler exports, one file a rank."""

import json
from pathlib import Path
from typing import Any

from .machine import DeviceSpan, HostSpan, Recording
from .program import Collective, Kernel

_KERNELS = {
    "all_to_allv": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    "all_reduce": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_allgather_base": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_reduce_scatter_base": "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "send": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    "recv": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
}  # fmt: skip
_CATEGORIES = {
    "annotation": "user_annotation", "step": "user_annotation", "module": "python_function", "operator": "cpu_op",
    "comms": "cpu_op", "runtime": "cuda_runtime",
}  # fmt: skip
_HOST = 4000
"""The process of rank 0's host."""
_ORIGIN_US = 5_000_000.0


def write_traces(recording: Recording, folder: Path, ahead_us: float = 0.0, drift: float = 0.0) -> list[Path]:
    """ahead_us, drift: by how much more than that of the rank before, on the same host or else on its own, the clock of
    a rank is ahead, and by which share too fast."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks = sorted(recording)
    return [_write(recording, rank, folder / f"rank{rank}.json", ahead_us, drift) for rank in ranks]


def _write(recording: Recording, rank: int, path: Path, ahead_us: float, drift: float) -> Path:
    used = {
        (own, op.group): op.ranks
        for own, one in recording.items() for op, *_ in one.device if isinstance(op, Collective)
    }  # fmt: skip
    names = {group: str(number) for number, group in enumerate(sorted({group for _, group in used}), start=1)}
    found = recording[rank]
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": _HOST + rank, "tid": 0, "ts": 0, "args": {"name": "python"}}
    ]
    events += [_device(span, names) for span in found.device]
    events += [_host(span, rank, names) for span in found.host]
    for event in events:
        event |= {"ts": event["ts"] * (1 + rank * drift) + rank * ahead_us}
        event |= {"dur": event["dur"] * (1 + rank * drift)} if "dur" in event else {}
    settings = [
        {"pg_name": names[group], "pg_desc": group, "backend_config": "cuda:nccl", "pg_size": len(ranks),
         "ranks": ranks}
        for (own, group), ranks in used.items() if own == rank
    ]  # fmt: skip
    job = {"backend": "nccl", "rank": rank, "world_size": len(recording), "pg_count": len(names),
           "pg_config": settings, "nccl_version": "2.27.5"}  # fmt: skip
    gpus = [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "numSms": 132, "computeMajor": 9, "computeMinor": 0}]
    host = f"node{rank if ahead_us or drift else 0}"  # ranks on one host share a clock
    whole = {"schemaVersion": 1, "deviceProperties": gpus, "distributedInfo": job, "host_name": host,
             "baseTimeNanoseconds": 0, "displayTimeUnit": "ms"}  # fmt: skip
    path.write_text(json.dumps({**whole, "traceEvents": events, "traceName": path.name}))
    return path


def _device(span: DeviceSpan, names: dict[str, str]) -> dict[str, Any]:
    op = span.op
    arguments: dict[str, Any] = {"device": 0, "stream": span.stream, "correlation": span.correlation}
    if isinstance(op, Kernel):
        name, category = op.name, op.category
        if category == "kernel":
            arguments |= {"grid": [op.grid, 1, 1], "block": [256, 1, 1], "queued": 0, "context": 1}
        else:
            arguments |= {"bytes": 8, "memory bandwidth (GB/s)": 0.01}
    else:
        name, category = _KERNELS[op.kind], "kernel"
        arguments |= {"grid": [24, 1, 1], "block": [640, 1, 1], "queued": 0, "context": 1, **_collective(op, names)}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": span.stream, "args": arguments,
            "ts": round(span.start + _ORIGIN_US, 3), "dur": round(span.end - span.start, 3)}  # fmt: skip


def _host(span: HostSpan, rank: int, names: dict[str, str]) -> dict[str, Any]:
    arguments: dict[str, Any] = {} if span.correlation is None else {"correlation": span.correlation}
    if span.op is not None:
        arguments |= _collective(span.op, names)
    name = f"nn.Module: {span.name}" if span.what == "module" else span.name
    return {"ph": "X", "cat": _CATEGORIES[span.what], "name": name, "pid": _HOST + rank, "tid": _HOST + rank,
            "args": arguments, "ts": round(span.start + _ORIGIN_US, 3), "dur": round(span.end - span.start, 3),
    }  # fmt: skip


def _collective(op: Collective, names: dict[str, str]) -> dict[str, Any]:
    source, destination = op.peers or (None, None)
    known = {} if op.peers is None else {"Src Rank": source, "Dst Rank": destination}
    known |= {} if op.sequence is None else {"Seq": op.sequence}
    return {
        "Collective name": op.kind, "In msg nelems": op.elements, "Out msg nelems": op.elements,
        "Group size": len(op.ranks), "dtype": "BFloat16", "Process Group Name": names[op.group],
        "Process Group Description": op.group, "Process Group Ranks": str(list(op.ranks)), **known,
    }  # fmt: skip
