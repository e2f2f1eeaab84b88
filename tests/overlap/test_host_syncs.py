"""Calls that make the host wait for a GPU are found on a CPU, with their lines."""

import pytest
import torch

from moe_dualpipe.overlap.host_syncs import host_syncs

COUNTS = torch.tensor([2, 0, 1])
WAITS = [
    ("item()", lambda x: x[0].item()), ("tolist()", lambda x: x.tolist()), ("bool()", lambda x: bool(x[0])),
    ("int()", lambda x: int(x[0])), ("float()", lambda x: float(x[0])), ("use as an index", lambda x: range(9)[x[0]]),
    ("nonzero()", lambda x: x.nonzero()), ("nonzero()", lambda x: torch.nonzero(x)),
    ("unique()", lambda x: x.unique()), ("cpu()", lambda x: x.cpu()), ("numpy()", lambda x: x.numpy()),
    ("bincount()", lambda x: x.bincount()), ("equal()", lambda x: torch.equal(x, x)),
    ("masked_select()", lambda x: x.masked_select(x > 1)), ("indexing with a mask", lambda x: x[x > 1]),
    ("indexing with a mask", lambda x: x.__setitem__((x > 1,), x[:1])),
    ("where() with one argument", lambda x: torch.where(x > 1)),
    ("repeat_interleave() without output_size", lambda x: x.repeat_interleave(x)),
    ("repeat_interleave() without output_size", lambda x: torch.repeat_interleave(x)),
]  # fmt: skip
DOES_NOT_WAIT = [
    lambda x: x[COUNTS], lambda x: x[1:], lambda x: x.__setitem__(x > 1, 0), lambda x: torch.where(x > 1, x, 0),
    lambda x: x.repeat_interleave(2), lambda x: x.repeat_interleave(x, output_size=3),
    lambda x: x.masked_fill(x > 1, 0),
]  # fmt: skip


@pytest.mark.parametrize("call,function", WAITS, ids=[call for call, _ in WAITS])
def test_a_call_that_waits_is_found_with_its_line(call, function):
    with host_syncs("cpu") as found:
        function(COUNTS.clone())
    line = function.__code__.co_firstlineno
    assert found == {f"tests/overlap/test_host_syncs.py:{line} in <lambda>": call}


@pytest.mark.parametrize("function", DOES_NOT_WAIT)
def test_a_call_that_does_not_wait_is_not_reported(function):
    with host_syncs("cpu") as found:
        function(COUNTS.clone())
    assert found == {}
