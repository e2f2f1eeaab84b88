"""Compare two recordings: the account of a step twice, and the differences, which add up.

As in `analyze`, a step lasts from its first computation to that of the next one. So the last step only tells where the
one before ends, and recordings of different lengths can be compared. A recording can have several devices: its numbers
are means over them. If a recording has no steps, whole recordings are compared.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from .account import Key, without_next
from .analyze import Analysis
from .communication import NAMES, Names
from .files import analyze_devices
from .reading import read_trace
from .windows import Choice


@dataclass(frozen=True, slots=True)
class Recording:
    """One or more devices, recorded together."""

    name: str
    analyses: Sequence[Analysis]
    remarks: Sequence[tuple[Path, str]]
    """Sentences about damaged and incomplete files, and about what is left out."""

    @property
    def gpus(self) -> list[str]:
        """Names of the GPUs; empty if unknown."""
        return sorted({analysis.gpu for analysis in self.analyses} - {""})

    @property
    def steps(self) -> int:
        """Number of steps that were recorded, at least, on every device; 0: none."""
        return min(len(analysis.steps) for analysis in self.analyses)

    @property
    def hidden_fraction(self) -> float | None:
        comm = sum(analysis.comm_us for analysis in self.analyses)
        return sum(analysis.hidden_kernels_us for analysis in self.analyses) / comm if comm else None

    def account(self, by_step: bool) -> dict[Key, float]:
        """The time of each kind and detail: of one step, or of the whole recording."""
        found: dict[Key, float] = defaultdict(float)
        for analysis in filter(attrgetter("account"), self.analyses):
            start, end, steps = analysis.account[0].start_us, analysis.account[-1].end_us, 1
            if by_step and len(analysis.steps) > 1:
                start, end, steps = analysis.steps[0].start, analysis.steps[-1].start, len(analysis.steps) - 1
            for entry in analysis.account:
                us = max(min(entry.end_us, end) - max(entry.start_us, start), 0.0)
                found[entry.kind, without_next(entry.detail)] += us / steps / len(self.analyses)
        return found


def read_recording(
    name: str, paths: Sequence[Path], names: Names = NAMES, steps: Choice = "default"
) -> Recording:  # fmt: skip
    """Read the files of one recording. Raises TraceError for a file that is not a trace or has no device events.

    steps: which to analyze; ValueError if they are not recorded.
    """
    devices = [
        device for path in paths for device in analyze_devices(path, read_trace(path), names, False, steps=steps)
    ]
    remarks = [(one.path, text) for one in devices for text in (*one.remarks, one.left_out) if text]
    return Recording(name, [device.analysis for device in devices], list(dict.fromkeys(remarks)))


@dataclass(frozen=True)
class Comparison:
    """Two recordings. Numbers are per step if `by_step`, otherwise of the whole recordings."""

    a: Recording
    b: Recording

    @property
    def by_step(self) -> bool:
        return self.a.steps > 0 and self.b.steps > 0

    @property
    def account(self) -> Mapping[Key, tuple[float, float]]:
        """The time of each kind and detail in A and B, the largest difference first."""
        a, b = (one.account(self.by_step) for one in (self.a, self.b))
        found = {key: (a.get(key, 0.0), b.get(key, 0.0)) for key in {**a, **b}}
        return dict(sorted(found.items(), key=lambda item: (-abs(item[1][1] - item[1][0]), item[0])))

    @property
    def times_us(self) -> tuple[float, float]:
        """The length of a step, or of the recording, in A and B."""
        times = self.account.values()
        return sum(a for a, _ in times), sum(b for _, b in times)

    @property
    def difference_us(self) -> float:
        """How much longer the step of B is."""
        a, b = self.times_us
        return b - a

    def as_object(self) -> dict[str, Any]:
        """A JSON object."""
        sides = {
            key: {"name": one.name, "devices": len(one.analyses), "gpus": one.gpus, "steps": one.steps,
                  "step_us": time, "hidden_fraction": one.hidden_fraction}
            for key, one, time in zip("ab", (self.a, self.b), self.times_us, strict=True)
        }  # fmt: skip
        return {
            "by_step": self.by_step, **sides, "difference_us": self.difference_us,
            "account": [{"kind": kind, "detail": detail, "a_us": a, "b_us": b, "difference_us": b - a}
                        for (kind, detail), (a, b) in self.account.items()],
        }  # fmt: skip
