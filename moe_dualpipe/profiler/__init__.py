"""Record and read traces of torch.profiler, and measure how much communication is hidden behind computation.

>>> from moe_dualpipe.profiler import analyze, read_trace
>>> for analysis in analyze(read_trace("trace.json.gz")):  # one for each device   # doctest: +SKIP
...     print(analysis.hidden_fraction)
"""

from .analyze import COMMUNICATION, Analysis, Kernel, Phase, analyze, kind_of
from .trace import Trace, TraceError, read_trace

__all__ = [
    "COMMUNICATION", "Analysis", "Kernel", "Phase", "Trace", "TraceError", "analyze", "kind_of", "read_trace",
]  # fmt: skip
