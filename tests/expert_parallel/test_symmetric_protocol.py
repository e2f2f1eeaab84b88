"""No order of the programs of two ranks makes Symmetric read a message early, overwrite one that is read, or deadlock.

The check uses events that the real kernels recorded (tests/machines/one_sided/record.py), not a model of them.
If any fence of the kernels is removed or weakened, it finds what goes wrong.
"""

from collections.abc import Iterator
from itertools import product

import pytest

pytest.importorskip("triton")

from tests.machines.one_sided.record import CALLS, Call, record
from tests.machines.one_sided.search import explore
from tests.machines.one_sided.weaken import check_fences
from tests.support.symmetric_ranks import needs_interpreter

pytestmark = needs_interpreter

RECEIVES, STORES = r"in receive_rows_\w+ of message \d, ", r"while program \d of rank \d may be storing"
OVERWRITTEN = rf"stores to .* may be loading|{RECEIVES}(loads .* {STORES}|finds message [12] in)"
READ_EARLY = rf"{RECEIVES}(loads \S+ .* {STORES}|finds nothing)"
SUMMED_EARLY = rf"in receive_sums_\w+ of message \d, (loads \S+ .* {STORES}|finds message)"
FENCES = {
    "push_kernel, wait_for_all: value = _acquire(flag)": OVERWRITTEN,
    "receive_rows_kernel, wait_for_all: value = _acquire(flag)": READ_EARLY,
    "receive_sums_kernel, wait_for_all: value = _acquire(flag)": SUMMED_EARLY,
    "release: tl.debug_barrier()": r"stores to state\[5\] .* while another of its threads may be loading it",
    'release: tl.atomic_xchg(flags_R, epoch, mask=r < R, sem="release", scope="sys")': READ_EARLY,
}


def test_all_orders_are_safe_and_none_of_the_fences_is_superfluous():
    check_fences(record(CALLS), FENCES)


def orders(done: tuple[Call, ...], starts: list[Call], slots: int) -> Iterator[list[Call]]:
    """All orders of starts and waits with at most `slots` transfers in flight, each in a slot of its own."""
    started = [call for call in done if call[0] != "wait"]
    pending = [i for i in range(len(started)) if ("wait", i) not in done]
    if len(started) == len(starts) and not pending:
        yield [*done]
    if len(started) < len(starts) and len(started) - slots not in pending:
        yield from orders((*done, starts[len(started)]), starts, slots)
    for i in pending:
        yield from orders((*done, ("wait", i)), starts, slots)


@pytest.mark.long
def test_ranks_may_wait_in_different_orders():
    starts: list[Call] = [("dispatch", 0, True), ("dispatch", 1, False), ("dispatch", 0, False)]
    prepared: list[Call] = [("prepare", 0), ("prepare", 1)]
    recordings = [record(prepared + order) for order in orders((), starts, slots=2)]
    assert len(recordings) == 7
    for one, other in product(recordings, recordings):
        assert one[1:] == other[1:]
        explore(one._replace(ranks=[one.ranks[0], other.ranks[1]]))
