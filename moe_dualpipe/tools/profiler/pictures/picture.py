"""What is drawn of one device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..account import TRANSFER, WAITING, Entry, spans_of
from ..categories import category_of
from ..communication import Kind, Names
from ..doctor.verdict import Verdict
from ..intervals import Intervals, difference, intervals_of, union
from ..phases import Phases
from ..trace import DeviceEvent, HostEvent, Trace


class Work(NamedTuple):
    """A device event with what is known about it."""

    event: DeviceEvent
    kind: Kind
    category: str
    phase: str = ""
    """The part of the program that launched it; "" if unknown."""
    owner: HostEvent | None = None
    """The annotation or module of the phase; None if unknown."""


def work_of(trace: Trace, names: Names, phases: Phases) -> tuple[Work, ...]:
    """The work of a trace that comes from `host_as_device`, sorted by start."""
    found = []
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
    def exposed(self) -> Intervals:
        return spans_of(self.account, TRANSFER, WAITING)

    @property
    def hidden(self) -> Intervals:
        """Communication that is not exposed."""
        return difference(union(intervals_of(one.event for one in self.of_kind("comm"))), self.exposed)

    def of_kind(self, kind: Kind) -> list[Work]:
        return [one for one in self.work if one.kind == kind]
