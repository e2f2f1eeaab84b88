"""Compute from a trace how much communication was hidden behind computation, and where the rest of the time went.

Names tell which device events are communication and which are copies (communication.py). In a trace without device
events, the CPU is the device (see host.py). Times are lengths of unions of intervals, so two kernels that run at the
same moment count once. Communication is hidden while a kernel computes on the same device, and exposed while neither a
kernel nor a copy runs. Copies compute nothing, but they are work that the device had to do: time beside them is neither
hidden nor exposed. All other times are sums of the account (account.py).
"""

from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

from ...messages import plural, printable
from ...overlap.labels import without_wait
from .account import (
    COMPUTATION,
    COPY,
    IDLE,
    SLOWED,
    TRANSFER,
    WAITING,
    Entry,
    Total,
    account,
    spans_of,
    totals,
)  # fmt: skip
from .categories import COPY_ENGINE, category_of
from .communication import NAMES, Names
from .doctor.verdict import Verdict
from .host import as_device
from .intervals import Intervals, intersection, intervals_of, union, union_length
from .trace import DeviceEvent, Trace
from .windows import DeviceStep


@dataclass(frozen=True, slots=True)
class Phase:
    """The device events that one part of the program launched. Times are sums over events, not unions."""

    name: str
    """The annotation or module."""
    times: int
    """Annotations or calls of modules that launched work, without waits. Of transfers: their number."""
    compute_us: float
    """Computation."""
    comm_us: float
    """Communication."""
    copy_us: float
    """Copies."""
    exposed_comm_us: float
    """Exposed time of the communication. Unlike the other times, the length of a union."""


@dataclass(frozen=True, slots=True)
class Analysis:
    """The result for one device. Times are in microseconds."""

    device: str
    """Number of the device; "cpu" for a CPU."""
    account: tuple[Entry, ...]
    """All times of the window: each moment has exactly one entry."""
    comm_us: float
    """Time in which at least one transfer runs."""
    hidden_kernels_us: float
    """Communication beside kernels, which is what counts as hidden."""
    copy_engine_us: float
    """Communication on copy engines, which use no SM."""
    num_comm: int
    """Number of transfers."""
    comm_blocks: int | None
    """Thread blocks of the largest communication kernel: an upper limit on the SMs that it uses. None: not recorded."""
    num_sms: int | None
    """SMs of the GPU. None: not recorded."""
    gpu: str
    """Name of the GPU; "" if unknown."""
    num_events: int
    """Number of device events."""
    phases: tuple[Phase, ...]
    """The device events by the part of the program that launched them."""
    verdicts: tuple[Verdict, ...] = ()
    """Causes of lost time, filled by `analyze_files`."""
    unexplained: tuple[Total, ...] = ()
    """Lost time that no cause explains, largest first. Filled by `analyze_files`."""
    steps: tuple[DeviceStep, ...] = ()
    """The steps that are analyzed, filled by `analyze_files`."""

    @property
    def name(self) -> str:
        return "cpu" if self.device == "cpu" else f"device {printable(self.device, 60)}"

    @property
    def window_us(self) -> float:
        """From the start of the first event to the end of the last one."""
        return self.account[-1].end_us - self.account[0].start_us if self.account else 0.0

    def time_of(self, *kinds: str) -> float:
        """The time of some kinds of entries."""
        return sum(entry.us for entry in self.account if entry.kind in kinds)

    @property
    def kernel_compute_us(self) -> float:
        """The time in which a kernel computes."""
        return self.time_of(COMPUTATION, SLOWED)

    @property
    def exposed_comm_us(self) -> float:
        """Communication beside neither kernels nor copies."""
        return self.time_of(TRANSFER, WAITING)

    @property
    def idle_us(self) -> float:
        """Nothing runs."""
        return self.time_of(*IDLE)

    @property
    def compute_us(self) -> float:
        """Kernels and copies; on a CPU, operators."""
        return self.time_of(COMPUTATION, SLOWED, COPY)

    @property
    def hidden_fraction(self) -> float | None:
        """Share of the communication that is hidden behind kernels; None without communication."""
        return self.hidden_kernels_us / self.comm_us if self.comm_us else None

    @property
    def hidden_sentence(self) -> str:
        """How much communication is hidden, in how many transfers, and how many thread blocks they occupy."""
        if self.hidden_fraction is None:
            return "There is no communication."
        is_kernel = self.device != "cpu" and not self.copy_engine_us
        kernels = plural(self.num_comm, "kernel" if is_kernel else "transfer")
        blocks = f", on up to {self.comm_blocks} thread blocks" if self.comm_blocks else ""
        blocks += f" of a GPU of {self.num_sms} SMs" if blocks and self.num_sms else ""
        return f"{self.hidden_fraction:.1%} of the communication is hidden ({kernels}{blocks})."

    def as_object(self) -> dict[str, Any]:
        """A JSON object."""
        more = {name: getattr(self, name) for name in COMPUTED}
        sums, left = ([one._asdict() for one in rows] for rows in (totals(self.account), self.unexplained))
        return {**asdict(replace(self, account=(), steps=())), **more, "account": sums, "unexplained": left,
                "steps": [step.number for step in self.steps]}  # fmt: skip


COMPUTED = (
    "window_us", "compute_us", "kernel_compute_us", "exposed_comm_us", "idle_us", "hidden_fraction",
)  # fmt: skip
"""Properties of an analysis that are in its JSON object, too."""


def analyze(trace: Trace, names: Names = NAMES) -> tuple[Analysis, ...]:
    """Return an analysis of each device with events, sorted by name."""
    return tuple(map(analyze_device, devices_of(as_device(trace, names))))


def devices_of(trace: Trace) -> list[Trace]:
    """The trace of each device with events, sorted by name. `trace` comes from `as_device`."""
    by_device: dict[str, list[DeviceEvent]] = defaultdict(list)
    for event in trace.device_events:
        by_device[event.device].append(event)
    return [replace(trace, device_events=by_device[device]) for device in sorted(by_device)]


def analyze_device(trace: Trace) -> Analysis:
    """Return the analysis of a trace of one device."""
    events, divided = trace.device_events, tuple(account(trace))
    transfers = [event for event in events if event.kind == "comm"]
    copies = [event for event in transfers if category_of(event) == COPY_ENGINE]
    kernels = union(intervals_of(event for event in events if event.kind == "compute"))
    comm, copied = (union(intervals_of(some)) for some in (transfers, copies))
    return Analysis(
        device=events[0].device, account=divided, comm_us=union_length(comm),
        hidden_kernels_us=union_length(intersection(comm, kernels)), copy_engine_us=union_length(copied),
        num_comm=len(transfers), num_sms=trace.num_sms or None, gpu=trace.gpu, num_events=len(events),
        comm_blocks=max((event.blocks for event in transfers), default=0) or None,
        phases=_phases(trace, spans_of(divided, TRANSFER)),
    )  # fmt: skip


def _phases(trace: Trace, exposed: Intervals) -> tuple[Phase, ...]:
    by_name: dict[str, list[DeviceEvent]] = defaultdict(list)
    for event in trace.device_events:
        by_name[event.phase].append(event)
    found = []
    waits = {wait._replace(name=without_wait(wait.name)) for wait in trace.waits}
    starts = {name: min((e.owner.start for e in own if e.owner), default=inf) for name, own in by_name.items() if name}
    for name in sorted(starts, key=lambda name: starts[name]):
        own = by_name[name]
        transfers, owners = [one for one in own if one.kind == "comm"], {one.owner for one in own if one.owner}
        compute, comm, copies = (
            sum(one.end - one.start for one in own if one.kind == kind) for kind in ("compute", "comm", "copy")
        )
        comm_exposed = union_length(intersection(union(intervals_of(transfers)), exposed))
        times = len(owners - waits) if owners else len(transfers)
        found.append(Phase(name, max(times, 1), compute, comm, copies, comm_exposed))
    return tuple(found)
