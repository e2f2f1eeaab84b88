"""What is drawn of one device, as an image or for Perfetto."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..doctor.verdict import Verdict
from ..lanes import Lanes


class Slice(NamedTuple):
    """A named span, in microseconds from the start of the device's first event."""

    start: float
    end: float
    name: str
    args: Mapping[str, Any] | None = None
    """What is shown of it when it is selected."""


@dataclass(frozen=True)
class Picture:
    """The lanes of one device and their title. shift_us: how much later they start than those of the first picture."""

    title: str
    lanes: Lanes
    shift_us: float = 0.0
    verdicts: Sequence[Verdict] = field(default=())
    account: Sequence[Slice] = field(default=())
    """What the device did at each moment."""

    @property
    def end_us(self) -> float:
        return self.shift_us + self.lanes.end_us
