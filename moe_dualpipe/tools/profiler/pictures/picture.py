"""What is drawn of traces, as an image (lanes.py) or for ui.perfetto.dev (perfetto.py)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..account import TRANSFER, WAITING, Entry, spans_of
from ..categories import short_name
from ..doctor.verdict import Verdict
from ..intervals import Intervals
from ..trace import DeviceEvent, Kind

LANES: dict[Kind, tuple[str, float]] = {
    "compute": ("computation", 0.86), "comm": ("communication", 0.86), "copy": ("copies", 0.4),
}  # fmt: skip
"""The name and the height of each lane."""


@dataclass(frozen=True)
class Picture:
    """The events of one device. All times are those of its trace; `shift_us` later on the axis of all pictures."""

    title: str
    work: Sequence[DeviceEvent]
    """Sorted by start."""
    shift_us: float = 0.0
    account: Sequence[Entry] = ()
    verdicts: Sequence[Verdict] = ()

    @property
    def start_us(self) -> float:
        return min((one.start for one in self.work), default=0.0)

    @property
    def end_us(self) -> float:
        """The end of the last work, on the axis of all pictures."""
        return max((one.end for one in self.work), default=-self.shift_us) + self.shift_us

    @property
    def exposed(self) -> Intervals:
        return spans_of(self.account, TRANSFER, WAITING)

    def of_kind(self, kind: Kind) -> list[DeviceEvent]:
        return [one for one in self.work if one.kind == kind]


class Slice(NamedTuple):
    """A named span, in microseconds of its trace. args: what ui.perfetto.dev shows when it is selected."""

    start: float
    end: float
    name: str
    args: Mapping[str, Any] | None = None


def runs(work: Iterable[DeviceEvent], gap: float) -> Iterator[Slice]:
    """Yield the runs of work that is sorted by start, each without gaps longer than `gap`.

    A run is successive work of one stream that the same annotation or module launched, or without one, of one name.
    """
    latest: dict[str, tuple[object, Slice]] = {}
    for one in work:
        name, launched = one.part or short_name(one.name), one.part and (one.part, one.owner)
        if one.stream in latest:
            before, run = latest[one.stream]
            if before == launched and run.name == name and one.start - run.end <= gap:
                latest[one.stream] = before, run._replace(end=max(run.end, one.end))
                continue
            yield run
        latest[one.stream] = launched, Slice(one.start, one.end, name)
    yield from (run for _, run in latest.values())
