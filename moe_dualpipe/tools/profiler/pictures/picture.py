"""What is drawn of one device, as an image or as a page."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..doctor.verdict import Verdict
from ..lanes import Lanes


@dataclass(frozen=True)
class Picture:
    """The lanes of one device and their title. shift_us: how much later they start than those of the first picture."""

    title: str
    lanes: Lanes
    shift_us: float = 0.0
    verdicts: Sequence[Verdict] = field(default=())

    @property
    def end_us(self) -> float:
        return self.shift_us + self.lanes.end_us
