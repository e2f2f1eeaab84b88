"""What the profiler says about made-up jobs (faults/), beside what is known about them.

python -m tests.support.diagnosed                              every fault at every strength
python -m tests.support.diagnosed --only "late launch" 2       one of them, with all that is said
python -m tests.support.diagnosed --only moe                   a healthy job
add --foreign for programs without annotations, --seed N, --pairs for all pairs
"""

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moe_dualpipe.tools.profiler.doctor.case import Case, Change
from moe_dualpipe.tools.profiler.doctor.replay import replay
from moe_dualpipe.tools.profiler.doctor.verdict import Verdict
from moe_dualpipe.tools.profiler.files import analyze_files


from .faults import FAULTS, PAIRS, Fault, Job, run, write_traces
from .faults.jobs import HEALTHY
from .faults.switches import STRENGTHS


def verdicts_of(job: Job, folder: Path) -> list[tuple[int, Verdict]]:
    """The verdicts on all ranks, each with its rank: largest gain first, those without a gain last."""
    files = analyze_files(write_traces(run(job), folder), pictures=False)
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
    """The verdicts on a faulty job. true_us: by how much the fault lengthened the window of the rank of the verdict."""

    fault: Fault
    kinds: list[str]
    window_us: float
    predicted_us: float | None
    true_us: float | None

    @property
    def named(self) -> bool:
        return self.fault.kind in self.kinds

    @property
    def costs(self) -> bool:
        """Whether the fault costs time. Beside another one, it may cost none."""
        return self.true_us is None or self.true_us > 0.015 * self.window_us

    @property
    def close(self) -> bool:
        """Whether the predicted gain is within 20% of the true one, or 1% of the window."""
        if self.predicted_us is None or self.true_us is None:
            return False
        return abs(self.predicted_us - self.true_us) <= max(0.2 * self.true_us, 0.01 * self.window_us)


def outcome(fault: Fault, faulty: Job, mended: Job, folder: Path) -> Outcome:
    return outcomes(faulty, {fault.name: (fault, mended)}, folder)[0]


def outcomes(faulty: Job, mended: Mapping[str, tuple[Fault, Job]], folder: Path) -> list[Outcome]:
    """mended: the faults of a job, each with the job without it."""
    found, before = verdicts_of(faulty, folder), run(faulty)
    kinds = list(dict.fromkeys(verdict.kind for _, verdict in found))
    every = []
    for fault, job in mended.values():
        after = run(job)
        true = {rank: one.window_us - after.ranks[rank].window_us for rank, one in before.ranks.items()}
        costly = max(true, key=lambda rank: true[rank])
        rank, verdict = next(((rank, v) for rank, v in found if v.kind == fault.kind), (costly, None))
        gain = verdict.gain_us if verdict else None
        every.append(Outcome(fault, kinds, before.ranks[rank].window_us, gain, true[rank] if fault.known else None))
    return every


def pair(one: Fault, other: Fault, job: Job, folder: Path, strengths: tuple[int, int] = (2, 2)) -> list[Outcome]:
    """Two faults at once, each with the gain of its own removal."""
    first, second = strengths
    alone = one.apply(job, first)
    mended = {one.name: (one, other.apply(job, second)), other.name: (other, alone)}
    return outcomes(other.apply(alone, second), mended, folder)


def _row(name: str, found: Outcome) -> str:
    named = (
        "first"
        if found.kinds[:1] == [found.fault.kind]
        else "named"
        if found.named
        else "MISSED"
        if found.costs
        else "-"
    )

    def share(us: float | None) -> str:
        return "-" if us is None else f"{us / found.window_us:.1%}"

    gain = "ok" if found.close or not found.fault.known else "FAR" if found.predicted_us is not None else "-"
    others = ", ".join(kind for kind in found.kinds if kind != found.fault.kind)
    return (
        f"{name:32} {named:7} predicted {share(found.predicted_us):>6} true {share(found.true_us):>6} {gain:4} {others}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--foreign", action="store_true")
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    name, strengths = (options.only or [""])[0], tuple(map(int, options.only[1:])) or STRENGTHS
    with tempfile.TemporaryDirectory() as folder:
        base = {"seed": options.seed} | ({"foreign": True} if options.foreign else {})
        for healthy, make in HEALTHY.items():
            if name in ("", healthy) and not options.pairs:
                more = base if healthy != "decode" else {"seed": options.seed}
                found = verdicts_of(make(**more), Path(folder))
                print(f"healthy {healthy:24}", ", ".join(f"{v.kind} of {rank}" for rank, v in found) or "nothing")
                if options.only:
                    pass
        for fault in FAULTS.values():
            if name not in ("", fault.name) or options.pairs:
                continue
            for strength in strengths:
                job = fault.healthy(**(base if fault.healthy is not HEALTHY["decode"] else {"seed": options.seed}))
                faulty = fault.apply(job, strength)
                print(_row(f"{fault.name} {strength}", outcome(fault, faulty, job, Path(folder))), flush=True)
                if options.only:
                    print(verdicts_text([v for _, v in verdicts_of(faulty, Path(folder))]))
        for one, other in PAIRS if options.pairs else ():
            for found, beside in zip(pair(one, other, one.healthy(**base), Path(folder)), (other, one), strict=True):
                print(_row(f"{found.fault.name} + {beside.name}", found), flush=True)


if __name__ == "__main__":
    main()
