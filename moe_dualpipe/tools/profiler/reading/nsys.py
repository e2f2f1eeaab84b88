"""Read what Nsight Systems recorded, from its SQLite export: `nsys export --type sqlite report.nsys-rep`.

Each row becomes an event as torch.profiler would write it, and kineto.py sorts both. If several processes used GPUs,
the name of each is put before its events, as in merged traces.

    event                 table of the export
    kernel, gpu_memcpy    CUPTI_ACTIVITY_KIND_KERNEL, _MEMCPY, _MEMSET; _GRAPH_TRACE for CUDA graphs recorded as a whole
    cuda_runtime          CUPTI_ACTIVITY_KIND_RUNTIME, by correlation id
    user_annotation       NVTX_EVENTS
    values beside events  META_DATA_CAPTURE, TARGET_INFO_*

Versions of Nsight Systems differ in tables and columns, and empty tables are not exported: what is missing counts as
not recorded. Source: the schema in the files themselves, and docs.nvidia.com/nsight-systems (SQLite schema reference).

Of NVTX ranges, those of users are annotations. Those of NVIDIA's libraries and of `torch.autograd.profiler.emit_nvtx`
("aten::mm, op_id = 5") say nothing about the program, except for "nccl:all_to_all, op_id = 5", which names a transfer.
"""

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from msgspec import Raw
from msgspec.json import encode

from ..trace import Trace, TraceError
from .chrome import ChromeTrace, Event
from .kineto import TRANSFER

KERNEL, MEMCPY, MEMSET, GRAPH, RUNTIME = (
    f"CUPTI_ACTIVITY_KIND_{name}" for name in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE", "RUNTIME")
)
RANGES = "NVTX_EVENTS"
_PLACE = "start", "end", "deviceId", "streamId", "correlationId", "globalPid"
_VERSION = re.compile(r"_v\d+$")
_COPIES = (
    "unknown", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP", "HtoD unified",
    "DtoH unified", "DtoD unified",
)  # fmt: skip
_MEMORIES = "Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static"
_DOMAIN_CREATED = 75  # ENUM_NSYS_EVENT_TYPE
_RANKS = "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"
_SIZES = "WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"
_GRAPHS = "CUDA graphs are recorded as a whole, without their kernels: record with --cuda-graph-trace=node"
_EMITTED = re.compile(r", (?:seq|op_id|sizes|input_op_ids) = .*", re.DOTALL)
_LIBRARY = re.compile(r"(?:NCCL|CCCL|NVSHMEM|cu[A-Z]\w*)$")
"""Names of NVTX domains of libraries."""


def is_sqlite(path: Path) -> bool:
    """Whether a file begins like a SQLite file. Raises OSError."""
    with path.open("rb") as file:
        return file.read(16) == b"SQLite format 3\0"


def read_nsys(path: Path, trace: Trace) -> ChromeTrace:
    """Read an export. Notes in `trace` what it lacks. Raises TraceError if it is not one, or is damaged."""
    # immutable: without locks and side files, so that a file in a folder without write access can be read
    uri = f"{path.resolve().as_uri()}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as file:
            file.text_factory = lambda text: text.decode("utf-8", "replace")
            export = _Export(path, file)
            found = ChromeTrace([*export.device(), *export.calls(), *export.ranges()])
            working = {event.pid for event in found.traceEvents if event.cat != "cuda_runtime" and event.tid == 0}
            several = len(working) > 1 and 0 not in working  # 0: unknown
            for event in found.traceEvents if several else ():
                event.pid = f"process {event.pid}, {event.pid}"
            export.describe(found, several)
            trace.notes += [_GRAPHS] if any(export.rows(GRAPH, "start")) else []
    except sqlite3.Error as error:
        raise TraceError(f"{path}: not a usable SQLite file: {error}") from None
    return found


class _Export:
    def __init__(self, path: Path, file: sqlite3.Connection):
        self.file = file
        self._columns: dict[str, set[str]] = defaultdict(set)
        for (table,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            self._columns[table] = {column for _, column, *_ in file.execute(f"PRAGMA table_info({_quoted(table)})")}
        if not self._columns["StringIds"]:
            raise TraceError(f"{path}: a SQLite file, but not an export of Nsight Systems: it has no table StringIds")
        self._names = dict(self.rows("StringIds", "id", "value"))
        self._gpus = {
            (pid, device): gpu for gpu, device, pid in self.rows("TARGET_INFO_CUDA_DEVICE", "gpuId", "cudaId", "pid")
        }

    def rows(self, table: str, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Yield these columns of a table, None where a column is missing; nothing if the table is missing."""
        known = self._columns[table]
        wanted = ", ".join(_quoted(column) if column in known else "NULL" for column in columns)
        return self.file.execute(f"SELECT {wanted} FROM {_quoted(table)}") if known else iter(())

    def device(self) -> Iterator[Event]:
        names = "demangledName", "shortName", "mangledName"
        for *place, demangled, short, mangled, x, y, z in self.rows(KERNEL, *_PLACE, *names, "gridX", "gridY", "gridZ"):
            known = (self._names.get(number) for number in (demangled, short, mangled))
            yield self._work(next(filter(None, known), "unnamed kernel"), "kernel", place, grid=[x, y, z])
        columns = "bytes", "copyKind", "srcKind", "dstKind", "srcDeviceId", "dstDeviceId"
        for *place, size, kind, source, target, gives, gets in self.rows(MEMCPY, *_PLACE, *columns):
            what = _of(_COPIES, kind) or "unknown"
            if what == "DtoD" and None not in (gives, gets) and gives != gets:
                what = "PtoP"
            memories = _of(_MEMORIES, source), _of(_MEMORIES, target)
            name = f"Memcpy {what}" + (f" ({memories[0]} -> {memories[1]})" if all(memories) else "")
            yield self._work(name, "gpu_memcpy", place, bytes=size)
        for *place, size in self.rows(MEMSET, *_PLACE, "bytes"):
            yield self._work("Memset (Device)", "gpu_memset", place, bytes=size)
        for *place, graph in self.rows(GRAPH, *_PLACE, "graphId"):
            yield self._work("CUDA graph" if graph is None else f"CUDA graph {graph}", "kernel", place)

    def _work(self, name: str, category: str, place: list[Any], **arguments: Any) -> Event:
        start, end, device, stream, correlation, process = place
        where = {"device": self._gpus.get((_process_id(process), device), device), "stream": stream}
        return _event(name, category, start, end, process, correlation=correlation, **where, **arguments)

    def calls(self) -> Iterator[Event]:
        columns = "start", "end", "globalTid", "correlationId", "nameId"
        for start, end, thread, correlation, name in self.rows(RUNTIME, *columns):
            text = _VERSION.sub("", self._names.get(name) or "")
            yield _event(text, "cuda_runtime", start, end, thread, correlation=correlation)

    def ranges(self) -> Iterator[Event]:
        """The NVTX ranges. One that never ended is left out."""
        columns = "start", "end", "globalTid", "text", "textId", "domainId", "eventType"
        rows = [
            (start, end, thread, str(text or self._names.get(number) or ""), (_process_id(thread), domain), kind)
            for start, end, thread, text, number, domain, kind in self.rows(RANGES, *columns)
        ]
        libraries = {
            domain for _, end, _, name, domain, kind in rows
            if end is None and kind == _DOMAIN_CREATED and _LIBRARY.match(name)
        }  # fmt: skip
        for start, end, thread, full, domain, _ in rows:
            name = _EMITTED.sub("", full)
            if end is not None and name and (TRANSFER.match(name) or (name == full and domain not in libraries)):
                yield _event(name, "user_annotation", start, end, thread)

    def describe(self, trace: ChromeTrace, several: bool) -> None:
        """several: whether the file has several ranks."""
        environment: dict[str, str] = {}
        for name, value in self.rows("META_DATA_CAPTURE", "name", "value"):
            if str(name).endswith(":ENVIRONMENT_VARIABLE"):
                key, _, text = str(value).partition("=")
                environment.setdefault(key, text.strip('"'))
        trace.CUDA_DEVICE_MAX_CONNECTIONS = environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
        if not several:
            rank, size = (next((environment[k] for k in keys if k in environment), None) for keys in (_RANKS, _SIZES))
            trace.distributedInfo = {"rank": rank, "world_size": size}
        gpus = [*self.rows("TARGET_INFO_GPU", "name", "smCount")]
        gpus += self.rows("TARGET_INFO_CUDA_DEVICE", "name", "numMultiprocessors")
        names, sizes = (next(filter(None, column), None) for column in zip(*gpus, strict=True)) if gpus else ("", 0)
        trace.deviceProperties = [{"name": names, "numSms": sizes}]
        for (started,) in self.rows("TARGET_INFO_SESSION_START_TIME", "utcEpochNs"):
            trace.baseTimeNanoseconds = started
        hosts = (value for name, value in self.rows("TARGET_INFO_SYSTEM_ENV", "name", "value") if name == "Hostname")
        trace.host_name = next(hosts, "")


def _event(name: str, category: str, start: object, end: object, thread: object = None, **arguments: Any) -> Event:
    times = (start / 1e3, (end - start) / 1e3) if isinstance(start, int) and isinstance(end, int) else (None, None)
    place = _process_id(thread), thread & 0xFFFFFF if isinstance(thread, int) else 0
    return Event("X", category, name, *times, *place, Raw(encode(arguments)))


def _process_id(identifier: object) -> int:
    """The process in a global id of a process or thread; 0 if unknown."""
    return identifier >> 24 & 0xFFFFFF if isinstance(identifier, int) else 0


def _of(names: tuple[str, ...], number: object) -> str:
    return names[number] if isinstance(number, int) and 0 <= number < len(names) else ""


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
