"""The planner against published runs.

python -m benchmarks.planner score  the error on published runs that took no part in the fit
python -m benchmarks.planner fit    writes moe_dualpipe/tools/planner/constants.json
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from benchmarks.common import table
from moe_dualpipe.command_line import Mark, program_options
from moe_dualpipe.tools.planner.constants import FILE

from .fit import GROUPS, Score, fit, predict, score, summary
from .ratios import ratio_errors
from .rows import read_rows

OWN = Path(__file__).parents[1] / "published_runs"
TITLES = {
    "new family": "Families of models left out, one after the other",
    "known family": "Only the runs of a family on one GPU left out, one GPU after the other",
}


@dataclass(frozen=True)
class Options:
    """Compare the planner with published runs."""

    command: Annotated[Literal["score", "fit"], Mark("{score,fit}", positional=True)]
    """score: the error on runs that took no part in the fit. fit: write the constants of the planner."""


def main() -> None:
    command = program_options(Options, "benchmarks.planner").command
    points = predict(read_rows(sorted(OWN.glob("*.json"))))
    if command == "fit":
        FILE.write_text(json.dumps(fit(points), indent=1) + "\n")
        print(f"{len(points)} rows -> {FILE}")
        return
    for group in GROUPS:
        print(f"{TITLES[group]}:\n\n{report(score(points, group))}\n")
    print(ratio_errors(points))


def report(scores: Sequence[Score]) -> str:
    """A table by family, of the runs with context parallelism, and of all."""
    lines = []
    for family in (*sorted({one.point.row.family for one in scores}), "cp > 1", "all"):
        own = [
            one for one in scores
            if family in (one.point.row.family, "all") or (family == "cp > 1" and one.point.row.load.layout.cp > 1)
        ]  # fmt: skip
        if not own:
            continue
        votes, mean, median, inside, slow = summary(own)
        errors = [one.error for one in own]
        lines.append((
            family, str(len(own)), f"{votes:.0f}", f"{mean:.1%}", f"{median:.1%}",
            f"{min(errors):+.0%} to {max(errors):+.0%}", f"{slow:.0%}", f"{inside:.0%}",
        ))  # fmt: skip
    titles = "family | rows | configurations | mean error | median | from, to | predicted too slow | inside"
    return table(titles, lines)


if __name__ == "__main__":
    main()
