"""What is drawn of traces, as an image (lanes.py) or for ui.perfetto.dev (perfetto.py)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..account import TRANSFER, WAITING, Entry, spans_of
from ..categories import category_of, short_name
from ..communication import Kind, Names
from ..doctor.verdict import Verdict
from ..intervals import Intervals
from ..phases import Phases
from ..trace import DeviceEvent, HostEvent, Trace

LANES: dict[Kind, tuple[str, float]] = {
    "compute": ("computation", 0.86), "comm": ("communication", 0.86), "copy": ("copies", 0.4),
}  # fmt: skip
"""The name and the height of each lane."""


class Work(NamedTuple):
    """A device event with its category, and the part of the program that launched it."""

    event: DeviceEvent
    kind: Kind
    category: str
    phase: str = ""
    """The part of the program that launched it; "" if unknown."""
    owner: HostEvent | None = None
    """The annotation or module of the phase; None if unknown."""

    @property
    def name(self) -> str:
        return self.phase or short_name(self.event.name)


def work_of(trace: Trace, names: Names) -> tuple[Work, ...]:
    """The work of a trace that comes from `host_as_device`, sorted by start."""
    found, phases = [], Phases(trace, names)
    for event in sorted(trace.device_events, key=lambda event: event.start):
        kind, name = names.kind_of(event), phases.name_of(event)
        unknown = name == event.name and not phases.is_named(event)
        owner = None if unknown else phases.owner_of(event)
        found.append(Work(event, kind, category_of(event, kind), "" if unknown else name, owner))
    return tuple(found)


@dataclass(frozen=True)
class Picture:
    """The work of one device. All times are those of its trace; `shift_us` later on the axis of all pictures."""

    title: str
    work: Sequence[Work]
    shift_us: float = 0.0
    account: Sequence[Entry] = ()
    verdicts: Sequence[Verdict] = ()

    @property
    def start_us(self) -> float:
        return min((one.event.start for one in self.work), default=0.0)

    @property
    def end_us(self) -> float:
        """The end of the last work, on the axis of all pictures."""
        return max((one.event.end for one in self.work), default=-self.shift_us) + self.shift_us

    @property
    def exposed(self) -> Intervals:
        return spans_of(self.account, TRANSFER, WAITING)

    def of_kind(self, kind: Kind) -> list[Work]:
        return [one for one in self.work if one.kind == kind]


class Slice(NamedTuple):
    """A named span, in microseconds of its trace. args: what ui.perfetto.dev shows when it is selected."""

    start: float
    end: float
    name: str
    args: Mapping[str, Any] | None = None


def runs(work: Iterable[Work], gap: float) -> Iterator[Slice]:
    """Yield the runs of work that is sorted by start, each without gaps longer than `gap`.

    A run is successive work of one stream that the same annotation or module launched, or without one, of one name.
    """
    latest: dict[str, tuple[Work, Slice]] = {}
    for one in work:
        start, end, stream = one.event.start, one.event.end, one.event.stream
        if stream in latest:
            first, run = latest[stream]
            if first[3:] == one[3:] and run.name == one.name and start - run.end <= gap:
                latest[stream] = first, run._replace(end=max(run.end, end))
                continue
            yield run
        latest[stream] = one, Slice(start, end, one.name)
    yield from (run for _, run in latest.values())
