"""Record and read traces of torch.profiler, and measure how much communication is hidden behind computation.

>>> from moe_dualpipe.tools.profiler import analyze, read_trace
>>> for analysis in analyze(read_trace("trace.json.gz")):  # one for each device   # doctest: +SKIP
...     print(analysis.hidden_fraction)
"""

from .analyze import Analysis, Phase, analyze
from .communication import NAMES, Names
from .reading import read_trace, read_traces
from .trace import Trace, TraceError

__all__ = [
    "NAMES", "Analysis", "Names", "Phase", "Trace", "TraceError", "analyze", "read_trace",
    "read_traces",
]  # fmt: skip
