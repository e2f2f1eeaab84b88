"""`moe-dualpipe profile compare`: what changed between two recordings."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ..command_line import Mark, Positional
from ..messages import printable
from ..tools.profiler.compare import Comparison, read_recording
from ..tools.profiler.reading.paths import trace_paths
from ..tools.profiler.reports.comparison import compare_text
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
        names = self.names()
        paths = [trace_paths([argument]) for argument in (self.a, self.b)]
        steps = parse_steps(self.steps)
        comparison = Comparison(*(read_recording(str(one), files, names, steps)
                                  for one, files in zip((self.a, self.b), paths, strict=True)))  # fmt: skip
        for one in (comparison.a, comparison.b):
            for path, sentence in one.remarks:
                print(f"{printable(path)}: {sentence}", file=sys.stderr)
        self.show(comparison.as_object(), compare_text(comparison))
