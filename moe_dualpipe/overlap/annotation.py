"""Named ranges in profiler traces, at almost no cost while nothing is recorded."""

from contextlib import AbstractContextManager
from typing import Any

from torch._C._profiler import _RecordFunctionFast
from torch.autograd import profiler


def annotation(text: str) -> AbstractContextManager[Any]:
    """`record_function(text)`; while torch.profiler records nothing, a cheaper one (0.7 us instead of 9 us).

    A trace would contain the cheaper one as an operator ("cpu_op"), not as a "user_annotation". Other observers, such
    as execution traces, see both alike.
    """
    if profiler._is_profiler_enabled:
        return profiler.record_function(text)
    return _RecordFunctionFast(text)  # type: ignore[return-value]
