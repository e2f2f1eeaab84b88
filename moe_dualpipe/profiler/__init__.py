"""See, and prove, what is hidden: traces of torch.profiler in numbers.

>>> from moe_dualpipe.profiler import analyze, read
>>> for analysis in analyze(read("trace.json.gz")):  # one for each device   # doctest: +SKIP
...     print(analysis.hidden_fraction)
"""

from .analyze import COMMUNICATION, Analysis, Kernel, Phase, analyze, kind_of
from .chrome import Trace, TraceError, read

__all__ = [
    "COMMUNICATION",
    "Analysis",
    "Kernel",
    "Phase",
    "Trace",
    "TraceError",
    "analyze",
    "kind_of",
    "read",
]
