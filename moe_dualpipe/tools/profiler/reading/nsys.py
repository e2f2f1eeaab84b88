"""Read what Nsight Systems recorded, from its SQLite export: `nsys export --type sqlite report.nsys-rep`.

    Trace                 table of the export
    device events         CUPTI_ACTIVITY_KIND_KERNEL, _MEMCPY, _MEMSET; _GRAPH_TRACE for CUDA graphs recorded as a whole
    launches, syncs       CUPTI_ACTIVITY_KIND_RUNTIME, by correlation id and process; _SYNCHRONIZATION: the streams
    annotations           NVTX_EVENTS (nsys_ranges.py)
    rank, clock, GPU      META_DATA_CAPTURE, TARGET_INFO_*

Versions of Nsight Systems differ in tables and columns, and empty tables are not exported: what is missing counts as
not recorded. Source: the schema in the files themselves, and docs.nvidia.com/nsight-systems (SQLite schema reference).
"""

import re
import sqlite3
import sys
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from ..trace import DeviceEvent, HostEvent, StreamWait, SyncCall, Trace, TraceError
from .collectives import name_transfers
from .header import QUEUES, whole
from .kineto import NO_TIME, WAITS
from .nsys_ranges import TABLE as RANGES
from .nsys_ranges import add_ranges
from .nsys_tables import Tables, process_id, thread_of

KERNEL, MEMCPY, MEMSET, GRAPH, RUNTIME, SYNC, EVENT = (
    f"CUPTI_ACTIVITY_KIND_{name}"
    for name in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE", "RUNTIME", "SYNCHRONIZATION", "CUDA_EVENT")
)
_DEVICE_TABLES = KERNEL, MEMCPY, MEMSET, GRAPH
_PLACE = "start", "end", "deviceId", "streamId", "correlationId", "globalPid"
_VERSION = re.compile(r"_v\d+$")
_COPIES = (
    "unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP", "HtoD unified",
    "DtoH unified", "DtoD unified",
)  # fmt: skip
_MEMORIES = "Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static"
_STREAM_WAIT, _STREAM_SYNC = 2, 3  # ENUM_CUPTI_SYNC_TYPE
_NO_STREAM = 2**32 - 1
_RANKS = "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"
_SIZES = "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"
_GRAPHS = "CUDA graphs are recorded as a whole, without their kernels: record with --cuda-graph-trace=node"


class _Place(NamedTuple):
    """Where and when work ran."""

    start: float
    end: float
    device: str
    stream: str
    correlation: int | None


def read_nsys(path: Path, most_events: int) -> Trace:
    """Read an export. Raises TraceError if it is not one, or is damaged; OSError if it cannot be opened.

    most_events: at most about so many rows are read, of each table in proportion.
    """
    path.open("rb").close()  # its errors say more than those of sqlite3
    try:
        with closing(Tables(path, (*_DEVICE_TABLES, RUNTIME, RANGES), most_events)) as tables:
            trace = _Reader(path, tables).read()
    except sqlite3.Error as error:
        raise TraceError(f"{path}: not a usable SQLite file: {error}") from None
    if not trace.device_events:
        raise TraceError(f"{path}: Nsight Systems recorded no work on a GPU: run it with --trace=cuda,nvtx")
    return trace


class _Reader:
    def __init__(self, path: Path, tables: Tables):
        if not tables.columns("StringIds"):
            raise TraceError(f"{path}: a SQLite file, but not an export of Nsight Systems: it has no table StringIds")
        self.tables, self.trace = tables, Trace(source="nsys")
        self._names: dict[int, str] = {}
        present = [table for table in _DEVICE_TABLES if tables.columns(table)]
        self._has_processes = all("globalPid" in tables.columns(table) for table in present)
        self._processes: dict[int, int] = {}
        """A number for each process. Correlation ids are unique only in a process."""
        self._users: dict[str, set[int]] = defaultdict(set)
        """The processes that used each device."""
        self._gpus = {
            (pid, device): gpu for gpu, device, pid in tables.rows("TARGET_INFO_CUDA_DEVICE", "gpuId", "cudaId", "pid")
        }
        users: dict[int, set[int]] = defaultdict(set)
        for table in present:
            for device, process in tables.distinct(table, "deviceId", "globalPid"):
                users[device].add(process_id(process))
        self._shared = {device for device, processes in users.items() if len(processes) > 1}
        for device, processes in users.items():
            for process in processes:
                self._users[self._device(device, process)].add(process)

    def read(self) -> Trace:
        trace, tables = self.trace, self.tables
        self._names = tables.names()
        self._read_kernels()
        self._read_copies()
        self._read_graphs()
        self._read_calls()
        self._read_syncs()
        add_ranges(trace, tables, self._names)
        name_transfers(trace)
        self._describe()
        trace.truncated = tables.truncated
        return trace

    def _read_kernels(self) -> None:
        columns = "demangledName", "shortName", "mangledName", "gridX", "gridY", "gridZ"
        for *place, demangled, short, mangled, x, y, z in self.tables.rows(KERNEL, *_PLACE, *columns):
            if (at := self._place(place)) is not None:
                name = self._name(demangled) or self._name(short) or self._name(mangled) or "unnamed kernel"
                blocks = (whole(x) or 0) * (whole(y) or 0) * (whole(z) or 0)
                self._add(name, "kernel", at, blocks)

    def _read_copies(self) -> None:
        columns = "bytes", "copyKind", "srcKind", "dstKind", "srcDeviceId", "dstDeviceId"
        for *place, size, kind, source, target, gives, gets in self.tables.rows(MEMCPY, *_PLACE, *columns):
            if (at := self._place(place)) is not None:
                what = _of(_COPIES, kind) or "unknown"
                if what == "DtoD" and None not in (gives, gets) and gives != gets:
                    what = "PtoP"
                memories = _of(_MEMORIES, source), _of(_MEMORIES, target)
                name = f"Memcpy {what}" + (f" ({memories[0]} -> {memories[1]})" if all(memories) else "")
                self._add(name, "gpu_memcpy", at, 0, size)
        for *place, size in self.tables.rows(MEMSET, *_PLACE, "bytes"):
            if (at := self._place(place)) is not None:
                self._add("Memset (Device)", "gpu_memset", at, 0, size)

    def _read_graphs(self) -> None:
        for *place, graph in self.tables.rows(GRAPH, *_PLACE, "graphId"):
            if (at := self._place(place)) is not None:
                self._add("CUDA graph" if graph is None else f"CUDA graph {graph}", "kernel", at, 0)
                if _GRAPHS not in self.trace.notes:
                    self.trace.notes.append(_GRAPHS)

    def _read_calls(self) -> None:
        trace = self.trace
        for start, end, thread, correlation, name in self.tables.rows(
            RUNTIME, "start", "end", "globalTid", "correlationId", "nameId"
        ):
            if not self._counted(start, end):
                continue
            number = self._correlation(thread, correlation)
            text = sys.intern(_VERSION.sub("", self._name(name)))
            call = HostEvent(text, start / 1e3, end / 1e3, thread_of(thread))
            if number is not None:
                trace.launches[number] = call
            if WAITS.search(text):
                trace.syncs.append(SyncCall(*call, number))

    def _read_syncs(self) -> None:
        """The streams of calls that wait, and of waits that are queued on a stream."""
        trace, tables = self.trace, self.tables
        recorded = {
            (process, event): (stream, self._correlation(process, correlation))
            for process, event, stream, correlation in tables.rows(
                EVENT, "globalPid", "eventSyncId", "streamId", "correlationId"
            )
            if event is not None
        }
        awaited: dict[int, str] = {}
        for start, kind, device, stream, correlation, process, event in tables.rows(
            SYNC, "start", "syncType", "deviceId", "streamId", "correlationId", "globalPid", "eventSyncId"
        ):
            number = self._correlation(process, correlation)
            if kind == _STREAM_WAIT and isinstance(start, int):
                source, by = recorded.get((process, event), (None, None))
                name = self._device(device, process_id(process))
                trace.stream_waits.append(StreamWait(
                    start / 1e3, name, self._stream(name, stream, process),
                    None if source is None else self._stream(name, source, process), by, number,
                ))  # fmt: skip
            elif kind == _STREAM_SYNC and number is not None and stream not in (None, _NO_STREAM):
                name = self._device(device, process_id(process))
                awaited[number] = self._stream(name, stream, process)
        trace.syncs = [
            call if call.correlation not in awaited else call._replace(stream=awaited[call.correlation])
            for call in trace.syncs
        ]

    def _describe(self) -> None:
        trace, tables = self.trace, self.tables
        environment: dict[str, str] = {}
        for name, value in tables.rows("META_DATA_CAPTURE", "name", "value"):
            if str(name).endswith(":ENVIRONMENT_VARIABLE"):
                key, _, text = str(value).partition("=")
                environment.setdefault(key, text.strip('"'))
        trace.queues = whole(environment.get(QUEUES)) or None
        if len(set().union(*self._users.values())) == 1:  # otherwise the file has several ranks
            trace.rank = next((whole(environment[key]) for key in _RANKS if key in environment), None)
            trace.world_size = next((whole(environment[key]) for key in _SIZES if key in environment), None) or None
        sms = [
            *tables.rows("TARGET_INFO_CUDA_DEVICE", "numMultiprocessors"),
            *tables.rows("TARGET_INFO_GPU", "smCount"),
        ]
        trace.num_sms = next((number for (value,) in sms if (number := whole(value))), 0)
        trace.gpu = next((str(name) for (name,) in tables.rows("TARGET_INFO_GPU", "name") if name), "")
        for (started,) in tables.rows("TARGET_INFO_SESSION_START_TIME", "utcEpochNs"):
            trace.base_us = started / 1e3 if isinstance(started, int) else 0.0
        for name, value in tables.rows("TARGET_INFO_SYSTEM_ENV", "name", "value"):
            if name == "Hostname":
                trace.host = str(value)

    def _add(self, name: str, category: str, at: _Place, blocks: int, size: object = 0) -> None:
        moved = size if isinstance(size, int) and size >= 0 else 0
        self.trace.device_events.append(DeviceEvent(sys.intern(name), category, *at, blocks, moved))

    def _place(self, columns: list[Any]) -> _Place | None:
        start, end, device, stream, correlation, process = columns
        if not self._counted(start, end):
            return None
        name = self._device(device, process_id(process))
        return _Place(
            start / 1e3, end / 1e3, name, self._stream(name, stream, process), self._correlation(process, correlation)
        )

    def _counted(self, start: object, end: object) -> bool:
        """Count a row. Returns whether its times are valid."""
        self.trace.num_events += 1
        valid = isinstance(start, int) and isinstance(end, int) and start <= end
        if not valid:
            self.trace.skipped[NO_TIME] += 1
        return valid

    def _device(self, device: object, process: int) -> str:
        gpu = self._gpus.get((process, device))
        if gpu is not None:
            return sys.intern(str(gpu))
        return sys.intern(f"{device} of process {process}" if device in self._shared else str(device))

    def _stream(self, device: str, stream: object, process: object) -> str:
        shared = len(self._users[device]) > 1
        return sys.intern(f"{stream} of process {process_id(process)}" if shared else str(stream))

    def _correlation(self, identifier: object, correlation: object) -> int | None:
        """A number for a correlation id of a process, from the global id of the process or of one of its threads."""
        if not isinstance(correlation, int):
            return None
        process = process_id(identifier) if self._has_processes else 0
        return correlation + (self._processes.setdefault(process, len(self._processes)) << 32)

    def _name(self, identifier: object) -> str:
        return self._names.get(identifier, "") if isinstance(identifier, int) else ""


def _of(names: tuple[str, ...], number: object) -> str:
    return names[number] if isinstance(number, int) and 0 <= number < len(names) else ""
