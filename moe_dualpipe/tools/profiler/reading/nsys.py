"""Read what Nsight Systems recorded, from its SQLite export: `nsys export --type sqlite report.nsys-rep`.

    Trace                 table of the export
    device events         CUPTI_ACTIVITY_KIND_KERNEL, _MEMCPY, _MEMSET; _GRAPH_TRACE for CUDA graphs recorded as a whole
    launches, syncs       CUPTI_ACTIVITY_KIND_RUNTIME, by correlation id and process; _SYNCHRONIZATION: the streams
    annotations           NVTX_EVENTS
    rank, clock, GPU      META_DATA_CAPTURE, TARGET_INFO_*

Versions of Nsight Systems differ in tables and columns, and empty tables are not exported: what is missing counts as
not recorded. Source: the schema in the files themselves, and docs.nvidia.com/nsight-systems (SQLite schema reference).

Of NVTX ranges, those of users are annotations. Those of NCCL name transfers; those of other libraries of NVIDIA say
nothing about the program. `torch.autograd.profiler.emit_nvtx` writes a range for each operator too, such as
"aten::mm, op_id = 5": these are left out, as in traces of torch.profiler, and only what a user, a framework or a custom
autograd function named stays.
"""

import re
import sqlite3
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from ..trace import DeviceEvent, HostEvent, SyncCall, Trace, TraceError
from .collectives import name_transfers, whole
from .kineto import NO_TIME, TRANSFER, WAITS, add_annotation

KERNEL, MEMCPY, MEMSET, GRAPH, RUNTIME, SYNC = (
    f"CUPTI_ACTIVITY_KIND_{name}"
    for name in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE", "RUNTIME", "SYNCHRONIZATION")
)
RANGES = "NVTX_EVENTS"
_PLACE = "start", "end", "deviceId", "streamId", "correlationId", "globalPid"
_VERSION = re.compile(r"_v\d+$")
_COPIES = (
    "unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP", "HtoD unified",
    "DtoH unified", "DtoD unified",
)  # fmt: skip
_MEMORIES = "Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static"
_STREAM_SYNC = 3  # ENUM_CUPTI_SYNC_TYPE
_NO_STREAM = 2**32 - 1
_DOMAIN_CREATED = 75  # ENUM_NSYS_EVENT_TYPE
_RANKS = "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"
_SIZES = "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"
_GRAPHS = "CUDA graphs are recorded as a whole, without their kernels: record with --cuda-graph-trace=node"
_EMITTED = re.compile(r", (?:seq|op_id|sizes|input_op_ids) = .*", re.DOTALL)
_OPERATOR = re.compile(r"[a-z_][\w.]*::")
_NCCL = re.compile(r"p?nccl(?=[A-Z])")
_NCCL_TRANSFERS = {
    "AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast", "Bcast": "broadcast", "Reduce": "reduce", "Send": "send", "Recv": "recv",
    "AlltoAll": "all_to_all", "AllToAll": "all_to_all", "Gather": "gather", "Scatter": "scatter",
}  # fmt: skip
_LIBRARY = re.compile(r"(?:NCCL|CCCL|NVSHMEM|cu[A-Z]\w*)$")
"""Names of NVTX domains of libraries."""


def is_sqlite(path: Path) -> bool:
    """Whether a file begins like a SQLite file. Raises OSError."""
    with path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\0"


def read_nsys(path: Path) -> Trace:
    """Read an export. Raises TraceError if it is not one, or is damaged."""
    # immutable: without locks and side files, so that a file in a folder without write access can be read
    uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as file:
            file.text_factory = lambda text: text.decode("utf-8", "replace")
            trace = _Reader(path, file).read()
    except sqlite3.Error as error:
        raise TraceError(f"{path}: not a usable SQLite file: {error}") from None
    if not trace.device_events:
        raise TraceError(f"{path}: Nsight Systems recorded no work on a GPU: run it with --trace=cuda,nvtx")
    return trace


class _Reader:
    def __init__(self, path: Path, file: sqlite3.Connection):
        self.file, self.trace = file, Trace(source="nsys")
        self._columns: dict[str, set[str]] = defaultdict(set)
        for (table,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            self._columns[table] = {column for _, column, *_ in file.execute(f"PRAGMA table_info({_quoted(table)})")}
        if not self._columns["StringIds"]:
            raise TraceError(f"{path}: a SQLite file, but not an export of Nsight Systems: it has no table StringIds")
        self._names = {number: str(text) for number, text in self._rows("StringIds", "id", "value") if text is not None}
        self._gpus = {
            (pid, device): gpu for gpu, device, pid in self._rows("TARGET_INFO_CUDA_DEVICE", "gpuId", "cudaId", "pid")
        }
        self._processes: dict[int, int] = {}
        """A number for each process. Correlation ids are unique only in a process."""

    def read(self) -> Trace:
        self._read_device()
        self._read_calls()
        self._read_syncs()
        self._read_ranges()
        name_transfers(self.trace)
        self._describe()
        return self.trace

    def _rows(self, table: str, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Yield these columns of a table, None where a column is missing; nothing if the table is missing."""
        known = self._columns[table]
        wanted = ", ".join(_quoted(column) if column in known else "NULL" for column in columns)
        return self.file.execute(f"SELECT {wanted} FROM {_quoted(table)}") if known else iter(())

    def _read_device(self) -> None:
        names = "demangledName", "shortName", "mangledName"
        for *place, demangled, short, mangled, x, y, z in self._rows(
            KERNEL, *_PLACE, *names, "gridX", "gridY", "gridZ"
        ):
            name = self._name(demangled) or self._name(short) or self._name(mangled) or "unnamed kernel"
            self._add(name, "kernel", place, (whole(x) or 0) * (whole(y) or 0) * (whole(z) or 0))
        columns = "bytes", "copyKind", "srcKind", "dstKind", "srcDeviceId", "dstDeviceId"
        for *place, size, kind, source, target, gives, gets in self._rows(MEMCPY, *_PLACE, *columns):
            what = _of(_COPIES, kind) or "unknown"
            if what == "DtoD" and None not in (gives, gets) and gives != gets:
                what = "PtoP"
            memories = _of(_MEMORIES, source), _of(_MEMORIES, target)
            name = f"Memcpy {what}" + (f" ({memories[0]} -> {memories[1]})" if all(memories) else "")
            self._add(name, "gpu_memcpy", place, 0, size)
        for *place, size in self._rows(MEMSET, *_PLACE, "bytes"):
            self._add("Memset (Device)", "gpu_memset", place, 0, size)
        for *place, graph in self._rows(GRAPH, *_PLACE, "graphId"):
            self._add("CUDA graph" if graph is None else f"CUDA graph {graph}", "kernel", place, 0)
            self.trace.notes = [_GRAPHS]

    def _add(self, name: str, category: str, place: list[Any], blocks: int, size: object = 0) -> None:
        start, end, device, stream, correlation, process = place
        if self._is_valid(start, end):
            moved = size if isinstance(size, int) and size >= 0 else 0
            self.trace.device_events.append(DeviceEvent(
                sys.intern(name), category, start / 1e3, end / 1e3, self._device(device, process),
                sys.intern(str(stream)), self._correlation(process, correlation), blocks, moved,
            ))  # fmt: skip

    def _read_calls(self) -> None:
        trace, columns = self.trace, ("start", "end", "globalTid", "correlationId", "nameId")
        for start, end, thread, correlation, name in self._rows(RUNTIME, *columns):
            if self._is_valid(start, end):
                number, text = self._correlation(thread, correlation), _VERSION.sub("", self._name(name))
                call = HostEvent(sys.intern(text), start / 1e3, end / 1e3, _thread_of(thread))
                if number is not None:
                    trace.launches[number] = call
                if WAITS.search(text):
                    trace.syncs.append(SyncCall(*call, number))

    def _read_syncs(self) -> None:
        """The streams of calls that wait."""
        awaited: dict[int | None, str] = {}
        columns = "syncType", "streamId", "correlationId", "globalPid"
        for kind, stream, correlation, process in self._rows(SYNC, *columns):
            number = self._correlation(process, correlation)
            if kind == _STREAM_SYNC and number is not None and stream not in (None, _NO_STREAM):
                awaited[number] = str(stream)
        trace = self.trace
        trace.syncs = [call._replace(stream=awaited.get(call.correlation)) for call in trace.syncs]

    def _read_ranges(self) -> None:
        """The NVTX ranges. One that never ended is left out."""
        trace, emitted = self.trace, defaultdict[tuple[str, str], list[HostEvent]](list)
        columns = "start", "end", "globalTid", "text", "textId", "domainId", "eventType"
        libraries = {
            (_process_id(identifier), domain)
            for _, end, identifier, text, text_id, domain, kind in self._rows(RANGES, *columns)
            if end is None and kind == _DOMAIN_CREATED and _LIBRARY.match(str(text or self._name(text_id)))
        }
        for start, end, identifier, text, text_id, domain, _ in self._rows(RANGES, *columns):
            full = str(text) if text is not None else self._name(text_id)
            if end is None:
                trace.num_events += 1
            if end is None or not self._is_valid(start, end) or not full:
                continue
            name = sys.intern(_EMITTED.sub("", full))
            event = HostEvent(name, start / 1e3, end / 1e3, _thread_of(identifier))
            if library := _NCCL.match(name):
                if (transfer := _NCCL_TRANSFERS.get(name[library.end() :])) is not None:
                    trace.transfers.append(event._replace(name=f"nccl:{transfer}"))
            elif len(name) < len(full):
                emitted[event.thread].append(event)
            elif (_process_id(identifier), domain) not in libraries:
                add_annotation(trace, event)
        for events in emitted.values():
            self._add_emitted(events)

    def _add_emitted(self, events: list[HostEvent]) -> None:
        """Add the ranges of one thread that emit_nvtx wrote, without operators and what is inside these."""
        until = float("-inf")
        for event in sorted(events, key=lambda event: (event.start, -event.end)):
            if TRANSFER.match(event.name):
                self.trace.transfers.append(event)
            elif event.start >= until:
                if _OPERATOR.match(event.name):
                    until = event.end
                else:
                    add_annotation(self.trace, event)

    def _describe(self) -> None:
        trace = self.trace
        environment: dict[str, str] = {}
        for name, value in self._rows("META_DATA_CAPTURE", "name", "value"):
            if str(name).endswith(":ENVIRONMENT_VARIABLE"):
                key, _, text = str(value).partition("=")
                environment.setdefault(key, text.strip('"'))
        trace.queues = whole(environment.get("CUDA_DEVICE_MAX_CONNECTIONS")) or None
        if len(self._processes) == 1:  # otherwise the file has several ranks
            trace.rank = next((whole(environment[key]) for key in _RANKS if key in environment), None)
            trace.world_size = next((whole(environment[key]) for key in _SIZES if key in environment), None) or None
        gpus = [*self._rows("TARGET_INFO_GPU", "name", "smCount")]
        gpus += self._rows("TARGET_INFO_CUDA_DEVICE", "name", "numMultiprocessors")
        trace.num_sms = next((number for _, count in gpus if (number := whole(count))), 0)
        trace.gpu = next((str(name) for name, _ in gpus if name), "")
        for (started,) in self._rows("TARGET_INFO_SESSION_START_TIME", "utcEpochNs"):
            trace.base_us = started / 1e3 if isinstance(started, int) else 0.0
        trace.host = next((str(value) for name, value in self._rows("TARGET_INFO_SYSTEM_ENV", "name", "value")
                           if name == "Hostname"), "")  # fmt: skip

    def _is_valid(self, start: object, end: object) -> bool:
        """Count a row. Returns whether its times are valid."""
        self.trace.num_events += 1
        valid = isinstance(start, int) and isinstance(end, int) and start <= end
        if not valid:
            self.trace.skipped[NO_TIME] += 1
        return valid

    def _device(self, device: object, process: object) -> str:
        return sys.intern(str(self._gpus.get((_process_id(process), device), device)))

    def _correlation(self, identifier: object, correlation: object) -> int | None:
        """A number for a correlation id of a process, from the global id of the process or of one of its threads."""
        number = self._processes.setdefault(_process_id(identifier), len(self._processes))
        return correlation + (number << 32) if isinstance(correlation, int) else None

    def _name(self, identifier: object) -> str:
        return self._names.get(identifier, "") if isinstance(identifier, int) else ""


def _process_id(identifier: object) -> int:
    """The process in a global id of a process or thread; 0 if unknown."""
    return identifier >> 24 & 0xFFFFFF if isinstance(identifier, int) else 0


def _thread_of(identifier: object) -> tuple[str, str]:
    thread = identifier & 0xFFFFFF if isinstance(identifier, int) else 0
    return sys.intern(str(_process_id(identifier))), sys.intern(str(thread))


def _of(names: tuple[str, ...], number: object) -> str:
    return names[number] if isinstance(number, int) and 0 <= number < len(names) else ""


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
