"""Named ranges in profiler traces, at almost no cost while nothing is recorded."""

from contextlib import AbstractContextManager
from typing import Any

from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler


def annotation(text: str) -> AbstractContextManager[Any]:
    """`record_function(text)`. While torch.profiler is off, a cheaper equivalent (0.7 us instead of 9 us).

    In a profiler's trace, the cheaper one would be an operator ("cpu_op") instead of a "user_annotation". For other
    observers, such as execution traces, the two are the same.
    """
    if profiler._is_profiler_enabled:
        return profiler.record_function(text)
    return _RecordFunctionFast(text)  # type: ignore[return-value]
