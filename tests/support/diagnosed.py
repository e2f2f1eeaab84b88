"""What the profiler says about made-up jobs (faults/), beside what is known about them.

python -m tests.support.diagnosed                        every fault at every strength, and the healthy jobs
python -m tests.support.diagnosed "late launch"          one of them, with all that is said
add --foreign for programs without annotations, --pairs for all pairs
"""

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moe_dualpipe.tools.profiler.doctor.case import Case
from moe_dualpipe.tools.profiler.doctor.replay import Change, replay
from moe_dualpipe.tools.profiler.doctor.verdict import Verdict
from moe_dualpipe.tools.profiler.files import TraceFiles, analyze_files
from moe_dualpipe.tools.profiler.reports.overlap import traces_text

from .faults import FAULTS, PAIRS, Fault, Job, run, write_traces
from .faults.jobs import HEALTHY
from .faults.switches import STRENGTHS


def analyzed(job: Job, folder: Path) -> TraceFiles:
    return analyze_files(write_traces(run(job), folder), pictures=False)


def verdicts_of(job: Job, folder: Path) -> list[tuple[int, Verdict]]:
    """The verdicts on all ranks, each with its rank: largest gain first, those without a gain last."""
    return _verdicts(analyzed(job, folder))


def _verdicts(files: TraceFiles) -> list[tuple[int, Verdict]]:
    found = [(device.rank or 0, verdict) for device in files.devices for verdict in device.analysis.verdicts]
    return sorted(found, key=lambda item: -(item[1].gain_us or 0.0))


def gain_of(case: Case, *changes: Change) -> float:
    """How much shorter the window of one device becomes after all changes."""
    graph = case.graph
    for change in changes:
        graph = change(graph)
    return case.window_us - replay(graph).window_us


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdicts on a faulty job. true_us: by how much the fault lengthened the window of the rank of the verdict.
    unexplained: the largest share of a window that no verdict explains."""

    fault: Fault
    kinds: list[str]
    window_us: float
    verdict: Verdict | None
    true_us: float | None
    unexplained: float

    @property
    def predicted_us(self) -> float | None:
        return self.verdict.gain_us if self.verdict else None

    @property
    def costs(self) -> bool:
        """Whether the fault costs time. Beside another one, it may cost none."""
        return self.true_us is None or self.true_us > 0.015 * self.window_us

    def close(self, share: float = 0.1, of_window: float = 0.005) -> bool:
        """Whether the predicted gain is within this share of the true one, or this share of the window."""
        if self.predicted_us is None or self.true_us is None:
            return False
        return abs(self.predicted_us - self.true_us) <= max(share * self.true_us, of_window * self.window_us)


def outcome(fault: Fault, faulty: Job, mended: Job, folder: Path) -> Outcome:
    return outcomes(faulty, {fault.name: (fault, mended)}, folder)[0]


def outcomes(faulty: Job, mended: Mapping[str, tuple[Fault, Job]], folder: Path) -> list[Outcome]:
    """mended: the faults of a job, each with the job without it."""
    files, before = analyzed(faulty, folder), run(faulty)
    found = _verdicts(files)
    kinds = list(dict.fromkeys(verdict.kind for _, verdict in found))
    left = max(sum(t.us for t in one.analysis.unexplained) / one.analysis.window_us for one in files.devices)
    every = []
    for fault, job in mended.values():
        after = run(job)
        true = {rank: one.window_us - after.ranks[rank].window_us for rank, one in before.ranks.items()}
        costly = max(true, key=lambda rank: true[rank])
        rank, verdict = next(((rank, v) for rank, v in found if v.kind == fault.kind), (costly, None))
        gain = true[rank] if fault.mended else None
        every.append(Outcome(fault, kinds, before.ranks[rank].window_us, verdict, gain, left))
    return every


def pair(one: Fault, other: Fault, job: Job, folder: Path, strengths: tuple[int, int] = (2, 2)) -> list[Outcome]:
    """Two faults at once, each with the gain of its own removal."""
    first, second = strengths
    alone = one.apply(job, first)
    mended = {one.name: (one, other.apply(job, second)), other.name: (other, alone)}
    return outcomes(other.apply(alone, second), mended, folder)


def _row(name: str, found: Outcome) -> str:
    def share(us: float | None) -> str:
        return "-" if us is None else f"{us / found.window_us:.1%}"

    gain = "ok" if found.close() or not found.fault.mended else "FAR" if found.verdict else "MISSED"
    return (
        f"{name:32} predicted {share(found.predicted_us):>6} true {share(found.true_us):>6} {gain:6} "
        f"left {found.unexplained:.1%} {', '.join(found.kinds)}"
    )


def main() -> None:
    names = [word for word in sys.argv[1:] if not word.startswith("-")]
    options = {"foreign": True} if "--foreign" in sys.argv else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for healthy, make in HEALTHY.items():
            if not names and "--pairs" not in sys.argv:
                print(f"{healthy:32}", ", ".join(f"{v.kind} of {rank}" for rank, v in verdicts_of(make(), folder)))
            elif healthy in names:
                print(traces_text(analyzed(make(), folder)))
        for fault in FAULTS.values():
            for strength in STRENGTHS if not names or fault.name in names else ():
                job = (
                    fault.healthy(**options)
                    if fault.healthy in (HEALTHY["moe"], HEALTHY["pipeline"])
                    else fault.healthy()
                )
                faulty = fault.apply(job, strength)
                if "--pairs" not in sys.argv:
                    mended = fault.mended(job, strength) if fault.mended else job
                    print(_row(f"{fault.name} {strength}", outcome(fault, faulty, mended, folder)), flush=True)
                if names:
                    print(traces_text(analyzed(faulty, folder)))
        for one, other in PAIRS if "--pairs" in sys.argv else ():
            for found, beside in zip(pair(one, other, one.healthy(**options), folder), (other, one), strict=True):
                print(_row(f"{found.fault.name} + {beside.name}", found), flush=True)


if __name__ == "__main__":
    main()
