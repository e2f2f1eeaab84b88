"""Calibrate the planner with published runs, and print its error.

    python -m benchmarks.planner fit      writes moe_dualpipe/tools/planner/constants.json
    python -m benchmarks.planner score    the error on each family of models, with constants fitted to the others
    python -m benchmarks.planner validate the error on rows that took no part in the fit
    python -m benchmarks.planner machine  predicted and measured steps of train.py on this machine's CPUs

The first three need rows of public runs: `--rows FILE ...`, in the format of benchmarks/published_runs/.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from benchmarks.common import table
from moe_dualpipe.tools.planner.constants import FILE, read_constants

from .fit import Score, fit, predict, score, validate
from .machine import compare_machine
from .ratios import ratio_errors
from .rows import read_rows

CALIBRATION = Path(__file__).parents[3] / "shared/data/published_runs.json"
OWN = Path(__file__).parents[1] / "published_runs"


@dataclass(frozen=True)
class Options:
    """Calibrate the planner with published runs, and print its error."""

    command: Positional[Literal["fit", "score", "validate", "machine"]]
    rows: tuple[Path, ...] = ()
    """Files of rows. None: the calibration rows, and for validate those of benchmarks/published_runs."""


def main(options: Options) -> None:
    if options.command == "machine":
        print(compare_machine())
        return
    files = options.rows or (tuple(sorted(OWN.glob("*.json"))) if options.command == "validate" else (CALIBRATION,))
    points = predict(read_rows(files))
    if not points:
        raise SystemExit("no rows that can be predicted: give files with --rows")
    match options.command:
        case "fit":
            FILE.write_text(json.dumps(fit(points), indent=1) + "\n")
            print(f"{len(points)} rows -> {FILE}")
        case "score":
            print(report(score(points)))
            print(ratio_errors(points))
        case "validate":
            print(report(validate(points, read_constants())))


def report(scores: Sequence[Score]) -> str:
    """A table by family, and the summary."""
    lines = []
    for family in sorted({one.point.row.family for one in scores}):
        own = [one for one in scores if one.point.row.family == family]
        errors = [100 * one.error for one in own]
        median = statistics.median(map(abs, errors))
        inside = sum(one.inside for one in own)
        lines.append((family, str(len(own)), f"{median:.1f}", f"{min(errors):+.1f} to {max(errors):+.1f}", f"{inside}"))
    every = statistics.median(100 * abs(one.error) for one in scores)
    families = statistics.median(float(line[2]) for line in lines)
    inside = sum(one.inside for one in scores) / len(scores)
    return (
        f"{table('family | rows | median error, % | from, to | inside the interval', lines)}\n\n"
        f"median absolute error: {every:.1f}% of rows, {families:.1f}% of families; {inside:.0%} inside the interval"
    )


if __name__ == "__main__":
    main(tyro.cli(Annotated[Options, tyro.conf.OmitArgPrefixes]))
