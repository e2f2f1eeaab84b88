"""`moe-dualpipe profile analyze` and `compare`: how much recorded traces hid, and what changed between two."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ..command_line import Mark, Positional
from ..messages import printable
from ..tools.drawing.figures import check_output
from ..tools.profiler.communication import Names
from ..tools.profiler.files import analyze_files
from ..tools.profiler.pictures.lanes import SUFFIXES, save_lanes
from ..tools.profiler.reading import trace_paths
from ..tools.profiler.report import compare, comparison_text
from ..tools.profiler.windows import parse_steps
from .options import JsonOption


@dataclass(frozen=True, kw_only=True)
class TraceOptions(JsonOption):
    """How traces are read."""

    comm: str | None = None
    """Regular expression. Kernels (on a CPU, annotations) whose names contain it are communication, too."""
    compute: str | None = None
    """Regular expression. Kernels whose names contain it are computation, whatever --comm or their library says."""
    steps: str | None = None
    """Steps to analyze: 3:7 (without step 7), 3:, :7 or 3. all: everything. None: all steps."""

    def names(self) -> Names:
        """Raises ValueError for an invalid expression."""
        try:
            return Names(self.comm, self.compute)
        except ValueError as error:
            raise ValueError(f"--{error}") from None


@dataclass(frozen=True)
class ProfileAnalyze(TraceOptions):
    """Analyze traces of torch.profiler or Nsight Systems: how much communication was hidden, and why not more.

    Several traces are analyzed one by one, and then compared. With --json, one device is an object, several are a list.
    """

    traces: Positional[Annotated[list[Path], Mark("TRACE [TRACE ...]")]]
    """Chrome traces (.json, .json.gz), exports of Nsight Systems (.sqlite), folders, or patterns ("run/*.json")."""
    phases: bool = False
    """Print a table of the annotations and modules that launched work."""
    out: Path | None = None
    """Draw computation above communication (.png, .svg), or write a file for ui.perfetto.dev (.json, .json.gz)."""

    def run(self) -> None:
        names = self.names()
        if not self.traces:
            raise ValueError("no trace to analyze: name at least one file")
        if self.out is not None:
            check_output(self.out, SUFFIXES)
        paths, steps = trace_paths(self.traces), parse_steps(self.steps)
        if self.out is not None and self.out.resolve() in [path.resolve() for path in paths]:
            raise ValueError(f"--out {printable(self.out)} is one of the traces: choose another name")
        found = analyze_files(paths, names, steps)
        for remark in found.remarks:
            print(remark, file=sys.stderr)
        if self.out is not None:
            save_lanes(found.pictures(), self.out)
        objects = found.as_objects()
        self.show(objects[0] if len(objects) == 1 else objects, found.as_text(self.phases))


@dataclass(frozen=True)
class ProfileCompare(TraceOptions):
    """Compare two recordings: steps, computation by category, and communication."""

    a: Positional[Annotated[Path, Mark("A")]]
    """Recording before the change: a trace, a folder of the ranks' traces, or a pattern such as "run/*.json"."""
    b: Positional[Annotated[Path, Mark("B")]]
    """Recording after the change."""

    def run(self) -> None:
        names, steps = self.names(), parse_steps(self.steps)
        paths = [trace_paths([argument]) for argument in (self.a, self.b)]
        both = [analyze_files(files, names, steps, causes=False) for files in paths]
        for files in both:
            left_out = [f"{printable(one.path)}: {one.left_out}" for one in files.devices if one.left_out]
            for remark in (*files.remarks, *dict.fromkeys(left_out)):
                print(remark, file=sys.stderr)
        a, b = ([device.analysis for device in files.devices] for files in both)
        found = compare(a, b, (str(self.a), str(self.b)))
        self.show(found, comparison_text(found))
