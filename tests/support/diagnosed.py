"""What the profiler says about made-up jobs (faults/), beside what is known about them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_dualpipe.tools.profiler import NAMES, read_trace
from moe_dualpipe.tools.profiler.doctor.device import Device
from moe_dualpipe.tools.profiler.doctor.replay import Change, replay
from moe_dualpipe.tools.profiler.doctor.verdict import Verdict
from moe_dualpipe.tools.profiler.files import TraceFiles, analyze_files
from moe_dualpipe.tools.profiler.host import as_device

from .faults import Fault, Job, Recording, run, write_traces

Ranked = list[tuple[int, Verdict]]
"""Verdicts with their ranks."""


def analyzed(recording: Recording, folder: Path) -> TraceFiles:
    return analyze_files(write_traces(recording, folder))


def ranked(files: TraceFiles) -> Ranked:
    """The verdicts on all ranks: largest gain first, those without a gain last."""
    found = [(device.trace.rank or 0, verdict) for device in files.devices for verdict in device.analysis.verdicts]
    return sorted(found, key=lambda item: -(item[1].gain_us or 0.0))


def verdicts_of(job: Job, folder: Path) -> Ranked:
    return ranked(analyzed(run(job), folder))


def case_of(path: Path) -> Device:
    """The case of the first device of a trace."""
    return Device(as_device(read_trace(path), NAMES))


def gain_of(case: Device, *changes: Change) -> float:
    """How much shorter the window of one device becomes after all changes."""
    graph = case.graph
    for change in changes:
        graph = change(graph)
    return case.window_us - replay(graph).window_us


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdicts on a faulty job, and that on one fault. true_us: by how much this lengthened the window of the rank
    of the verdict; None if unknown. unexplained: the largest share of a window that no verdict explains."""

    fault: Fault
    kinds: set[str]
    window_us: float
    verdict: Verdict | None
    true_us: float | None
    unexplained: float

    @property
    def costs(self) -> bool:
        """Whether the fault costs time. Beside another one, it may cost none."""
        return self.true_us is None or self.true_us > 0.015 * self.window_us

    def close(self, share: float = 0.1, of_window: float = 0.005) -> bool:
        """Whether the predicted gain is within this share of the true one, or this share of the window."""
        predicted = self.verdict.gain_us if self.verdict else None
        if predicted is None or self.true_us is None:
            return predicted is None and self.true_us is None
        return abs(predicted - self.true_us) <= max(share * self.true_us, of_window * self.window_us)


def outcomes(faulty: Job, mended: Sequence[tuple[Fault, Recording]], folder: Path) -> list[Outcome]:
    """mended: the faults of a job, each with the recording of the job without it."""
    before = run(faulty)
    files = analyzed(before, folder)
    found = ranked(files)
    left = max(sum(t.us for t in one.analysis.unexplained) / one.analysis.window_us for one in files.devices)
    every = []
    for fault, after in mended:
        true = {rank: one.window_us - after[rank].window_us for rank, one in before.items()}
        costly = max(true, key=lambda rank: true[rank])
        rank, verdict = next(((rank, v) for rank, v in found if v.kind == fault.kind), (costly, None))
        gain, kinds = true[rank] if fault.mended else None, {verdict.kind for _, verdict in found}
        every.append(Outcome(fault, kinds, before[rank].window_us, verdict, gain, left))
    return every
