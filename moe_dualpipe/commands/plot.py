"""`moe-dualpipe plot`: the curves of one run, or of several to compare."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from ..drawing.output import check_output


@dataclass(frozen=True)
class Plot:
    """Draw the curves of a run, or of several in one figure: loss, speed, expert load, whatever they recorded."""

    runs: Positional[list[Path]]
    """Folders of runs."""
    out: Path | None = None
    """File to draw into (.png, .svg, .pdf). Default: curves.png in the folder of the first run."""
    along: Literal["step", "tokens", "hours"] = "step"
    """What goes to the right: steps, tokens trained on, or hours of training."""

    def run(self) -> None:
        from ..drawing.curves import run_summary, save_curves
        from ..training.metrics import read_records

        if not self.runs:
            raise ValueError("no run to plot: name at least one folder, as runs/tiny")
        runs = {str(folder): read_records(folder) for folder in self.runs}
        if not any("loss" in record for records in runs.values() for record in records):
            raise ValueError(f"nothing to plot yet: no step recorded in {', '.join(runs)}")
        out = self.out if self.out is not None else self.runs[0] / "curves.png"
        check_output(out, (".png", ".svg", ".pdf"))
        save_curves(runs, out, self.along)
        print("\n".join([*(run_summary(name, records) for name, records in runs.items()), f"wrote {out}"]))
