"""Sort the events of torch.profiler into a Trace.

The names of categories and arguments are those of kineto (libkineto/src/ActivityType.cpp, output_json.cpp), of
roctracer, XPU and MTIA builds of it, and of older versions.
"""

import math
import re
import sys
from array import array
from collections.abc import Callable, Iterator
from typing import Any

from ....overlap.labels import OWN_TRANSFERS
from ..trace import Collective, DeviceEvent, HostEvent, MemoryPoint, StreamWait, SyncCall, Trace
from .collectives import RecordedCollectives
from .header import whole

TRANSFER = re.compile(rf"(nccl|gloo|ucc|mpi|xccl|{OWN_TRANSFERS}):(?!:)")
"""Names of events for whole transfers, by torch's backends and this package. They are not annotations."""
_OWN_CALLS = re.compile(f"{OWN_TRANSFERS}::")
_STEP = re.compile(r"ProfilerStep[#*]")
_OPERATOR = re.compile(r"(?:\w+::)*\w+")
_MODULE = "nn.Module: "
WAITS = re.compile(r"[Ss]ynchronize|Memcpy(?!.*Async)|^(?:ur|pi|ze)\w*(?:Finish|Wait)(?!WithBarrier)")
"""Names of calls in which the host waits, of CUDA, HIP, SYCL and MTIA."""

_COPIES = ("gpu_memcpy", "gpu_memset", "memcpy", "memset")
_LAUNCHES = (
    "cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime", "hip_driver", "xpu_runtime", "xpu_driver",
    "mtia_runtime", "privateuse1_runtime", "privateuse1_driver", "glow_runtime",
)  # fmt: skip
_LONGEST_TIME = 1e17  # microseconds: 3,000 years
NO_TIME = "no valid time"

_Handler = Callable[[str, float, float, tuple[str, str], dict[str, Any]], None]


class _Columns:
    """Host events in a quarter of the memory."""

    def __init__(self) -> None:
        self._times, self._numbers = array("d"), array("L")
        self._places: dict[tuple[str, tuple[str, str]], int] = {}

    def add(self, name: str, start: float, end: float, thread: tuple[str, str]) -> None:
        self._times.extend((start, end))
        self._numbers.append(self._places.setdefault((name, thread), len(self._places)))

    def events(self) -> Iterator[HostEvent]:
        places, times = [*self._places], iter(self._times)
        for number, start, end in zip(self._numbers, times, times, strict=True):
            name, thread = places[number]
            yield HostEvent(name, start, end, thread)


class KinetoEvents:
    """Takes the objects of a Chrome trace one by one."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self._collectives = RecordedCollectives()
        self._threads: dict[tuple[str, str], tuple[str, str]] = {}
        self._operators = _Columns()
        self._awaited: dict[int, str] = {}
        """The stream that a call waits for, by correlation id."""
        self._handlers: dict[str, _Handler] = {
            "kernel": self._kernel, "hpu_op": self._kernel, **dict.fromkeys(_LAUNCHES, self._launch),
            "user_annotation": self._annotation, "cpu_op": self._operator, "operator": self._old_operator,
            "python_function": self._python, "cuda_sync": self._sync, "mtia_ccp_events": self._mtia,
        }  # fmt: skip
        self._handlers |= {category: self._copier(category) for category in _COPIES}

    def add(self, event: dict[str, Any]) -> None:
        """Keep what the analysis needs of one event. One without a valid time is skipped and counted."""
        if event.get("ph") != "X":
            if event.get("name") == "[memory]":
                self._memory(event)
            return
        category = event.get("cat", "")
        handler = self._handlers.get(category if isinstance(category, str) else "")
        handler = handler or self._handlers.get(str(category).lower())
        if handler is None:
            return
        start, length = time_of(event.get("ts")), time_of(event.get("dur", 0))
        if start is None or length is None or length < 0:
            self.trace.skipped[NO_TIME] += 1
            return
        thread = str(event.get("pid")), str(event.get("tid"))
        thread = self._threads.setdefault(thread, thread)
        arguments = event.get("args")
        # one string per name and one pair per thread, not one per event
        name = sys.intern(str(event.get("name", "")))
        handler(name, start, start + length, thread, arguments if isinstance(arguments, dict) else {})

    def finish(self) -> None:
        """Connect what is known only after the last event."""
        trace = self.trace
        if not trace.device_events:  # only then are operators looked at, and they are most of a long trace
            trace.operators += self._operators.events()
        trace.syncs = [
            sync._replace(stream=self._awaited.get(sync.correlation)) if sync.correlation in self._awaited else sync
            for sync in trace.syncs
        ]
        trace.stream_waits = list(dict.fromkeys(trace.stream_waits))  # some versions write each twice
        self._collectives.connect(trace)

    def _kernel(self, name: str, start: float, end: float, thread: tuple[str, str], arguments: dict[str, Any]) -> None:
        grid = arguments.get("grid")
        blocks = math.prod(map(_count, grid)) if isinstance(grid, list) and len(grid) <= 3 else 0
        collective: Collective | None = None
        if "Collective name" in arguments:
            collective = self._collectives.read(arguments)
        device, stream = _place(arguments, thread)
        correlation = _id(arguments.get("correlation"))
        self.trace.device_events.append(
            DeviceEvent(name, "kernel", start, end, device, stream, correlation, blocks, 0, collective)
        )

    def _copier(self, category: str) -> _Handler:
        def add(name: str, start: float, end: float, thread: tuple[str, str], arguments: dict[str, Any]) -> None:
            self._copy(category, name, start, end, thread, arguments, "bytes")

        return add

    def _copy(
        self, category: str, name: str, start: float, end: float,
        thread: tuple[str, str], arguments: dict[str, Any], size: str,
    ) -> None:  # fmt: skip
        device, stream = _place(arguments, thread)
        moved = arguments.get(size)
        moved = moved if type(moved) is int and 0 <= moved < 2**63 else 0
        correlation = _id(arguments.get("correlation"))
        self.trace.device_events.append(DeviceEvent(name, category, start, end, device, stream, correlation, 0, moved))

    def _launch(self, name: str, start: float, end: float, thread: tuple[str, str], arguments: dict[str, Any]) -> None:
        correlation = _id(arguments.get("correlation"))
        if correlation is not None:
            self.trace.launches[correlation] = HostEvent(name, start, end, thread)
        if WAITS.search(name):
            self.trace.syncs.append(SyncCall(name, start, end, thread, correlation))

    def _annotation(self, name: str, start: float, end: float, thread: tuple[str, str], _: dict[str, Any]) -> None:
        add_annotation(self.trace, HostEvent(name, start, end, thread))

    def _operator(
        self, name: str, start: float, end: float, thread: tuple[str, str], arguments: dict[str, Any]
    ) -> None:
        if TRANSFER.match(name):
            self.trace.transfers.append(HostEvent(name, start, end, thread))
        else:
            self._operators.add(name, start, end, thread)
        if "Collective name" in arguments:
            self._collectives.add_call(HostEvent(name, start, end, thread), arguments)

    def _old_operator(
        self, name: str, start: float, end: float, thread: tuple[str, str], arguments: dict[str, Any]
    ) -> None:
        """PyTorch 1.8 and 1.9 write annotations into the category of operators: "ProfilerStep#5"."""
        is_operator = _OPERATOR.fullmatch(name) or TRANSFER.match(name)
        (self._operator if is_operator else self._annotation)(name, start, end, thread, arguments)

    def _python(self, name: str, start: float, end: float, thread: tuple[str, str], _: dict[str, Any]) -> None:
        if name.startswith(_MODULE):
            self.trace.modules.append(HostEvent(sys.intern(name.removeprefix(_MODULE)), start, end, thread))

    def _sync(self, name: str, start: float, _: float, thread: tuple[str, str], arguments: dict[str, Any]) -> None:
        correlation, device = _id(arguments.get("correlation")), str(arguments.get("device", thread[0]))
        waited = arguments.get("wait_on_stream", arguments.get("stream") if "Stream" in name else None)
        awaited = str(waited) if (whole(waited) is not None) else None  # -1 and 2^32 - 1 stand for unknown
        if name == "Stream Wait Event":
            stream, recorded = (
                str(arguments.get("stream", thread[1])),
                _id(arguments.get("wait_on_cuda_event_record_corr_id")),
            )
            self.trace.stream_waits.append(StreamWait(start, device, stream, awaited, recorded, correlation))
        elif correlation is not None and awaited is not None:
            self._awaited[correlation] = awaited

    def _mtia(self, name: str, start: float, end: float, thread: tuple[str, str], arguments: dict[str, Any]) -> None:
        """Work on an MTIA device. Its pid is the device; waits for events of other streams are not work."""
        if name == "event_wait":
            stream, awaited = str(arguments.get("stream", thread[1])), arguments.get("wait_on_stream")
            correlation = _id(arguments.get("correlation"))
            self.trace.stream_waits.append(
                StreamWait(start, thread[0], stream, None if awaited is None else str(awaited), None, correlation)
            )
        elif name == "dma_request":
            self._copy("gpu_memcpy", name, start, end, thread, arguments, "size")
        elif name != "event_record":
            self._kernel(name, start, end, thread, arguments)

    def _memory(self, event: dict[str, Any]) -> None:
        arguments, time = event.get("args"), time_of(event.get("ts"))
        if not isinstance(arguments, dict) or time is None:
            return
        allocated, reserved = arguments.get("Total Allocated"), arguments.get("Total Reserved")
        if type(allocated) is int and type(reserved) is int:
            device = "cpu" if arguments.get("Device Type") == 0 else sys.intern(str(arguments.get("Device Id", "")))
            self.trace.memory.append(MemoryPoint(time, device, allocated, reserved))


def add_annotation(trace: Trace, event: HostEvent) -> None:
    """Add an annotation, unless its name says that it is a transfer, a call that starts one, or a step."""
    if TRANSFER.match(event.name):
        trace.transfers.append(event)
    elif _OWN_CALLS.match(event.name):
        trace.operators.append(event)
    else:
        (trace.steps if _STEP.match(event.name) else trace.annotations).append(event)


def time_of(value: object) -> float | None:
    """A time in microseconds, also as a string with a point or comma; None if it is not valid."""
    try:
        time = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        try:
            time = float(value.replace(",", ".")) if isinstance(value, str) else math.nan
        except ValueError:
            return None
    return time if -_LONGEST_TIME < time < _LONGEST_TIME else None


def _place(arguments: dict[str, Any], thread: tuple[str, str]) -> tuple[str, str]:
    """The device and the stream of work."""
    device, stream = arguments.get("device"), arguments.get("stream")
    return (
        thread[0] if device is None else sys.intern(str(device)),
        thread[1] if stream is None else sys.intern(str(stream)),
    )


def _id(value: object) -> int | None:
    """A correlation id, also as a string; None if it is not valid."""
    if type(value) is int:
        return value
    return whole(value) if isinstance(value, str) else None


def _count(value: object) -> int:
    """A count in a trace; 0 if it is not valid."""
    return value if type(value) is int and 0 <= value < 2**32 else 0
