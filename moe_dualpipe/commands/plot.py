"""`moe-dualpipe plot`: curves of one or several runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from ..data.stores import is_url, local_path, open_folder
from ..messages import printable
from ..tools.drawing.curves import run_summary, save_curves
from ..tools.drawing.output import check_output
from ..training.metrics import read_records


@dataclass(frozen=True)
class Plot:
    """Draw the metrics of one or several runs into one figure: loss, speed, expert load and others."""

    runs: Positional[Annotated[list[str], arg(metavar="RUN [RUN ...]")]]
    """Folders or URLs of runs."""
    out: Path | None = None
    """Output file (.png, .svg, .pdf). None: curves.png in the folder of the first run, which then must be local."""
    along: Literal["step", "tokens", "hours"] = "step"
    """The x axis: steps, training tokens, or hours of training."""

    def run(self) -> None:
        if not self.runs:
            raise ValueError("no run to plot: name at least one folder, for example runs/tiny")
        if self.out is None and is_url(self.runs[0]):
            raise ValueError(f"the figure of {printable(self.runs[0])} needs a local file: add --out curves.png")
        folders = [local_path(run) for run in self.runs]
        for folder in folders:
            open_folder(folder)
        runs = {printable(folder): read_records(folder) for folder in folders}
        if not any("loss" in record for records in runs.values() for record in records):
            raise ValueError(f"nothing to plot: no step recorded in {', '.join(runs)}")
        out = self.out if self.out is not None else folders[0] / "curves.png"
        check_output(out, (".png", ".svg", ".pdf"))
        save_curves(runs, out, self.along)
        print("\n".join([*(run_summary(name, records) for name, records in runs.items()), f"wrote {printable(out)}"]))
