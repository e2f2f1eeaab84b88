"""Sort the events of torch.profiler into a Trace.

The names of categories and arguments are those of kineto (libkineto/src/ActivityType.cpp, output_json.cpp), and of
roctracer and XPU builds of it.

Kineto writes the arguments of a collective to its kernels. Where it does not, the call of the collective on the host
has them, and the kernel was launched inside that call. Otherwise the name of the call, such as "nccl:all_to_all", is
all that is known.
"""

import math
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from msgspec.json import decode

from ....expert_parallel.labels import is_exchange
from ....overlap.labels import OWN_TRANSFERS
from ..communication import NAMES
from ..trace import PEER_COPY, WAITS, Collective, DeviceEvent, HostEvent, Trace
from .chrome import DAMAGE, ChromeTrace, Event

TRANSFER = re.compile(rf"(nccl|gloo|ucc|mpi|xccl|{OWN_TRANSFERS}):(?!:)")
"""Names of events for whole transfers, by torch's backends and this package. They are not annotations."""
_OWN_CALLS = re.compile(f"{OWN_TRANSFERS}::")
_STEP = re.compile(r"ProfilerStep[#*]")
_MODULE = "nn.Module: "
_ON_DEVICES = re.compile(r"\bDtoD\b|DeviceToDevice")
_LAUNCHES = (
    "cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "xpu_runtime", "xpu_driver", "privateuse1_runtime",
    "privateuse1_driver",
)  # fmt: skip
_NOT_TRANSFERS = "wait", "init"
_LONGEST_TIME = 1e17  # microseconds: 3,000 years


def sort_events(file: ChromeTrace, trace: Trace) -> None:
    """Fill in `trace` with all that the analysis needs. An event without a valid time is skipped and counted."""
    _describe(file, trace)
    sorter = _Sorter(trace)
    trace.num_events = len(file.traceEvents)
    for event in file.traceEvents:
        sorter.take(event)
    sorter.complete()


def _describe(file: ChromeTrace, trace: Trace) -> None:
    """The rank, its process groups, the clock and the GPU."""
    job, gpus = file.distributedInfo, file.deviceProperties
    if isinstance(job, dict):
        trace.rank, trace.world_size = whole(job.get("rank")), whole(job.get("world_size")) or None
        groups = job.get("pg_config")
        trace.groups = dict(filter(None, map(_group, groups if isinstance(groups, list) else ())))
    if isinstance(gpus, list) and gpus and isinstance(gpus[0], dict):
        trace.num_sms = whole(gpus[0].get("numSms")) or 0
        trace.gpu = str(gpus[0].get("name") or "")
    trace.host = str(file.host_name)
    trace.queues = whole(file.CUDA_DEVICE_MAX_CONNECTIONS) or None
    if type(base := file.baseTimeNanoseconds) is int and abs(base) < 2**63:
        trace.base_us = base / 1e3


def _group(fields: object) -> tuple[str, tuple[int, ...]] | None:
    if not isinstance(fields, dict) or not isinstance(ranks := fields.get("ranks"), list):
        return None
    known = tuple(rank for rank in map(whole, ranks) if rank is not None)
    return (str(fields.get("pg_name", "")), known) if known and len(known) == len(ranks) else None


class _Sorter:
    """Puts each event into the list of the trace that its category belongs to. Equal collectives are kept once."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self._collectives: dict[Collective, Collective] = {}
        self._calls: list[tuple[HostEvent, Collective]] = []
        self._threads: dict[tuple[str, str], tuple[str, str]] = {}
        self._handlers: dict[str, Callable[[HostEvent, Event], None]] = {
            "kernel": self._kernel, "hpu_op": self._kernel, **dict.fromkeys(_LAUNCHES, self._launch),
            "user_annotation": self._annotation, "cpu_op": self._operator, "python_function": self._python,
            **{category: partial(self._copy, category) for category in ("gpu_memcpy", "gpu_memset")},
        }  # fmt: skip

    def take(self, event: Event) -> None:
        handler = self._handlers.get(event.cat) if event.ph == "X" and isinstance(event.cat, str) else None
        if handler is not None and (timed := self._timed(event)) is not None:
            handler(timed, event)

    def _timed(self, event: Event) -> HostEvent | None:
        start, length = time_of(event.ts), time_of(event.dur)
        if start is None or length is None or length < 0:
            self.trace.skipped += 1
            return None
        thread = str(event.pid), str(event.tid)
        # one string per name and one pair per thread, not one per event
        return HostEvent(sys.intern(str(event.name)), start, start + length, self._threads.setdefault(thread, thread))

    def _arguments(self, event: Event) -> dict[str, Any]:
        try:
            found = decode(event.args)
        except DAMAGE:
            self.trace.repaired += 1
            found = None
            with suppress(*DAMAGE):
                found = decode(bytes(event.args).decode("utf-8", "replace"))
        return found if isinstance(found, dict) else {}

    def _kernel(self, timed: HostEvent, event: Event) -> None:
        arguments = self._arguments(event)
        grid = arguments.get("grid")
        blocks = math.prod(whole(size) or 0 for size in grid) if isinstance(grid, list) and len(grid) <= 3 else 0
        collective = self._collective(arguments) if "Collective name" in arguments else None
        self._add("kernel", timed, arguments, blocks=blocks, collective=collective)

    def _copy(self, category: str, timed: HostEvent, event: Event) -> None:
        arguments = self._arguments(event)
        if arguments.get("fromDevice") != arguments.get("toDevice"):
            category = PEER_COPY
        self._add(category, timed, arguments, bytes=size(arguments.get("bytes")) or 0)

    def _add(
        self, category: str, timed: HostEvent, arguments: dict[str, Any], blocks: int = 0, **more: Any
    ) -> None:  # fmt: skip
        """Add a device event. Without a device and a stream, it is on those of its process and thread."""
        name, start, end, thread = timed
        device, stream = (
            thread[place] if arguments.get(key) is None else sys.intern(str(arguments[key]))
            for place, key in enumerate(("device", "stream"))
        )
        correlation = _id(arguments.get("correlation"))
        event = DeviceEvent(name, category, start, end, device, stream, correlation, blocks, **more)
        self.trace.device_events.append(event)

    def _launch(self, timed: HostEvent, event: Event) -> None:
        launches, correlation = self.trace.launches, _id(self._arguments(event).get("correlation"))
        if (correlation is None or correlation in launches) and WAITS.search(timed.name):
            correlation = -1 - len(launches)
        if correlation is not None:
            launches[correlation] = timed

    def _annotation(self, timed: HostEvent, _: Event) -> None:
        """Add an annotation, unless its name says that it is a transfer, a call that starts one, or a step."""
        trace = self.trace
        if TRANSFER.match(timed.name):
            trace.transfers.append(timed)
        elif _OWN_CALLS.match(timed.name):
            trace.operators.append(timed)
        else:
            (trace.steps if _STEP.match(timed.name) else trace.annotations).append(timed)

    def _operator(self, timed: HostEvent, event: Event) -> None:
        (self.trace.transfers if TRANSFER.match(timed.name) else self.trace.operators).append(timed)
        if timed.name == "record_param_comms" and "Collective name" in (arguments := self._arguments(event)):
            collective = self._collective(arguments)
            if collective.name not in _NOT_TRANSFERS:
                self._calls.append((timed, collective))

    def _collective(self, arguments: dict[str, Any]) -> Collective:
        """The collective in the arguments of an event."""
        name = str(arguments["Collective name"])
        num_ranks = whole(arguments.get("Group size")) or 0
        peer = arguments.get("Dst Rank" if "send" in name.lower() else "Src Rank")
        found = Collective(
            name, str(arguments.get("Process Group Name", arguments.get("Process Group ID", ""))),
            str(arguments.get("Process Group Description", "")), _ranks(arguments, num_ranks), num_ranks,
            size(arguments.get("In msg nelems")), size(arguments.get("Out msg nelems")),
            str(arguments.get("dtype", "")), whole(arguments.get("Seq")), whole(peer),
        )  # fmt: skip
        return self._collectives.setdefault(found, found)

    def _python(self, timed: HostEvent, _: Event) -> None:
        if timed.name.startswith(_MODULE):
            self.trace.modules.append(timed._replace(name=sys.intern(timed.name.removeprefix(_MODULE))))

    def complete(self) -> None:
        """Add to the device events what only the whole trace tells.

        Transfers without a collective get that of the call that launched them, or the name of the transfer around it.
        """
        trace = self.trace
        if trace.device_events:
            trace.operators = []  # they are the work of the device only where the CPU is the device
        of_call = {id(call): collective for call, collective in self._calls}
        around = trace.innermost_around([call for call, _ in self._calls])
        named = trace.innermost_on_thread(trace.transfers)
        known: dict[int | None, Collective] = {}
        known |= {number: Collective(call.name.partition(":")[2]) for number, call in named.items()}
        known |= {number: of_call[id(call)] for number, call in around.items()}
        trace.device_events = [self._completed(event, known) for event in trace.device_events]

    def _completed(self, event: DeviceEvent, known: dict[int | None, Collective]) -> DeviceEvent:
        """The event as a copy to another device, if it is one, and with its collective and the ranks of its group."""
        if event.category == "gpu_memcpy" and _ON_DEVICES.search(event.name):
            # memory that other ranks share looks local: the annotation says where a copy goes
            owner = self.trace.annotation_of(event)
            if owner is not None and is_exchange(owner.name):
                event = event._replace(category=PEER_COPY)
        found, groups = event.collective, self.trace.groups
        if found is None and event.correlation in known and NAMES.kind_of(event) == "comm":
            found = known[event.correlation]
        if found is not None and not found.ranks and found.group in groups:
            found = found._replace(ranks=groups[found.group])
            found = self._collectives.setdefault(found, found)
        return event if found is event.collective else event._replace(collective=found)


def time_of(value: object) -> float | None:
    """A time in microseconds, also as a string; None if it is not valid."""
    try:
        time = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return time if -_LONGEST_TIME < time < _LONGEST_TIME else None


def _id(value: object) -> int | None:
    """A correlation id, also as a string; None if it is not valid."""
    return value if type(value) is int else whole(value)


def whole(value: object) -> int | None:
    """A count or an index, also as a string; None if it is not valid."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 12:
        value = int(value)
    return value if type(value) is int and 0 <= value < 2**31 else None


def size(value: object) -> int | None:
    """A number of elements or bytes; None if it is not valid."""
    return value if type(value) is int and 0 <= value < 2**63 else None


def _ranks(arguments: dict[str, Any], num_ranks: int) -> tuple[int, ...]:
    """The ranks of a group; kineto elides long lists, such as "[0, 1, ..., 63]"."""
    words = str(arguments.get("Process Group Ranks", "")).strip("[]").replace(",", " ").split()
    ranks = tuple(number for number in map(whole, words) if number is not None)
    first, step = whole(arguments.get("Global rank start")), whole(arguments.get("Global rank stride"))
    if len(ranks) < len(words) or not ranks:
        ranks = ()
        if first is not None and step and num_ranks < 1 << 20:
            ranks = tuple(range(first, first + step * num_ranks, step))
    return ranks if len(ranks) == num_ranks or not num_ranks else ()
