"""Inject faults into real runs on this CPU, and compare the predicted gains with the measured ones.

    python -m benchmarks.doctor                      all faults and pairs of faults, about five minutes
    python -m benchmarks.doctor --only wait-at-once  one fault

Runs with a fault and without it take turns. Each is recorded. From a recording with the fault alone, the profiler must
name the fault and predict how much shorter the run is without it. A slow rank needs two processes, which this
program starts itself. Predicted and measured gains are the medians and the ranges of the rounds. Their ratio is the
median of the ratios by round, because a random fault is not the same in each.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import tyro

from benchmarks.common import full_range, table, take_turns
from moe_dualpipe.tools.profiler.doctor.verdict import Verdict
from moe_dualpipe.tools.profiler.files import analyze_files

from .faults import FAULTS, READ, SLOW, WAIT, Run
from .ranks import record_ranks, recordings

PAIRS = (WAIT, SLOW), (READ, SLOW)
SLOW_RANK = "slow rank"

Recorded = dict[bool, list[list[Path]]]
"""Recordings with and without a fault: for each round, the files of all ranks."""


@dataclass(frozen=True)
class Options:
    """Options of the benchmark."""

    only: str = "all"
    """The fault to inject."""
    rounds: int = 5
    """Rounds. In each, every run is recorded once."""
    out: str = ""
    """For internal use: where a rank records."""


def record_pairs(fault: str, others: Sequence[str], rounds: int, folder: Path) -> Recorded:
    """Record runs with `others`, with `fault` and without it."""
    every = {fault, *others}
    runs = {True: Run(every), False: Run(others, every)}
    count = iter(range(10_000))

    def recorded(faulty: bool) -> Callable[[], list[Path]]:
        def record() -> list[Path]:
            path = folder / f"{next(count)}.json"
            runs[faulty].record(path)
            return [path]

        return record

    return take_turns(rounds, {faulty: recorded(faulty) for faulty in runs}, warm_up=1)


def record_processes(rounds: int, folder: Path) -> Recorded:
    """Record runs of two processes, with a slow rank and without."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "benchmarks.doctor", "--rounds", str(rounds), "--out", str(folder),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, stderr=subprocess.DEVNULL)
    return {faulty: [recordings(folder, faulty, number) for number in range(rounds)] for faulty in (True, False)}


def diagnosed(paths: list[Path]) -> tuple[float, list[Verdict]]:
    """The window of the first rank in microseconds, and the causes on all ranks, largest gain first."""
    files = analyze_files(paths, pictures=False)
    verdicts = [verdict for device in files.devices for verdict in device.analysis.verdicts]
    return files.devices[0].analysis.window_us, sorted(verdicts, key=lambda verdict: -(verdict.gain_us or 0.0))


def row(fault: str, others: Sequence[str], recorded: Recorded) -> list[str]:
    found = {faulty: [diagnosed(paths) for paths in rounds] for faulty, rounds in recorded.items()}
    kind = FAULTS.get(fault, "imbalance")
    named = [[verdict for verdict in verdicts if verdict.kind == kind] for _, verdicts in found[True]]
    predicted = [verdicts[0].gain_us / 1e3 if verdicts and verdicts[0].gain_us else None for verdicts in named]
    gains = [gain for gain in predicted if gain is not None]
    windows = {faulty: [window / 1e3 for window, _ in rounds] for faulty, rounds in found.items()}
    by_round = [faulty - healthy for faulty, healthy in zip(windows[True], windows[False], strict=True)]
    ratios = [gain / own for gain, own in zip(predicted, by_round, strict=True) if gain is not None and own > 0]
    known = {FAULTS[other] for other in others} | {"nothing-to-overlap"}  # which is true of some healthy runs
    wrongs = [verdict.kind for _, verdicts in found[False] for verdict in verdicts if verdict.kind not in known]
    return [
        fault, ", ".join(others) or "-", kind, f"{sum(map(bool, named))} of {len(named)}",
        *(f"{statistics.median(windows[faulty]):.0f}" for faulty in (True, False)),
        f"{statistics.median(gains):.0f} ({full_range(gains, '.0f')})" if gains else "-",
        f"{statistics.median(by_round):.0f} ({full_range(by_round, '.0f')})",
        f"{statistics.median(ratios):.2f}" if ratios else "-",
        ", ".join(f"{count} {wrong}" for wrong, count in Counter(wrongs).items()) or "none",
    ]  # fmt: skip


COLUMNS = (
    "fault | beside | cause | named | median, ms | without the fault | predicted gain, ms | measured gain, ms "
    "| predicted / measured | wrong causes without the fault"
)


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    if options.out:
        dist.init_process_group("gloo")
        record_ranks(Path(options.out), options.rounds)
        dist.destroy_process_group()
        return
    cases = [(fault, ()) for fault in (*FAULTS, SLOW_RANK)]
    cases += [case for one, other in PAIRS for case in ((one, (other,)), (other, (one,)))]
    if options.only != "all":
        cases = [case for case in cases if case == (options.only.replace("-", " "), ())]
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, {options.rounds} rounds\n", flush=True)
    rows = []
    for fault, others in cases:
        with tempfile.TemporaryDirectory() as name:
            folder, rounds = Path(name), options.rounds
            slow_rank = fault == SLOW_RANK
            recorded = record_processes(rounds, folder) if slow_rank else record_pairs(fault, others, rounds, folder)
            rows.append(row(fault, others, recorded))
    print(table(COLUMNS, rows))


if __name__ == "__main__":
    main()
