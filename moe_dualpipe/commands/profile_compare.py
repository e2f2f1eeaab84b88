"""`moe-dualpipe profile compare`: what changed between two recordings."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ..command_line import Mark, Positional
from ..messages import printable
from ..tools.profiler.files import analyze_files
from ..tools.profiler.reading import trace_paths
from ..tools.profiler.report import compare, comparison_text
from ..tools.profiler.windows import parse_steps
from .profile import TraceOptions


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
