"""No order of the programs of two ranks makes Symmetric read a message early, overwrite one that is read, or deadlock.

The check uses events that the real kernels recorded (tests/machines/one_sided/record.py), not a model of them.
If any fence of the kernels is removed or weakened, it finds what goes wrong.
"""

import functools
from collections.abc import Iterator
from itertools import product

import pytest

pytest.importorskip("triton")

from tests.machines.one_sided.events import HazardError
from tests.machines.one_sided.record import Call, record
from tests.machines.one_sided.search import explore
from tests.machines.one_sided.sources import change_source
from tests.machines.one_sided.weaken import weakened
from tests.support.symmetric_ranks import needs_interpreter

pytestmark = needs_interpreter
SYNC = ["barrier", "flags"]
# A dispatch and a combine in each of two lanes, so that both slots are used twice.
CALLS: list[Call] = [
    ("prepare", 0), ("prepare", 1), ("dispatch", 0, True), ("dispatch", 1, True), ("wait", 0), ("combine", 0, True),
    ("wait", 1), ("combine", 1, False), ("wait", 2), ("wait", 3),
]  # fmt: skip
BRIEF: list[Call] = [("prepare", 0), ("dispatch", 0, True), ("wait", 0), ("combine", 0, True), ("wait", 1)]
record_calls = functools.cache(lambda sync: record(sync, CALLS))

RECEIVES, STORES = r"in receive_rows_\w+ of message \d, ", r"while program \d of rank \d may be storing"
OVERWRITTEN = rf"stores to .* may be loading|{RECEIVES}(loads .* {STORES}|finds message [12] in)"
READ_EARLY = rf"{RECEIVES}(loads \S+ .* {STORES}|finds nothing)"
SUMMED_EARLY = rf"in receive_sums_\w+ of message \d, (loads \S+ .* {STORES}|finds message)"
FENCES = {
    "push_kernel, wait_for_all: value = _acquire(flag)": OVERWRITTEN,
    "receive_rows_kernel, wait_for_all: value = _acquire(flag)": READ_EARLY,
    "receive_sums_kernel, wait_for_all: value = _acquire(flag)": SUMMED_EARLY,
    "release: tl.debug_barrier()": r"stores to state\[8\] .* while another of its threads may be loading it",
    'release: tl.atomic_xchg(flags_R, epoch, mask=r < R, sem="release", scope="sys")': READ_EARLY,
}
FENCES_OF_FLAGS = {
    "release_last: tl.debug_barrier()": READ_EARLY,
    'release_last: if tl.atomic_add(state + _DONE, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1:':
        READ_EARLY,
    'release_last: tl.atomic_xchg(state + _DONE, 0, sem="relaxed", scope="gpu")': "finds that 2 programs have ended",
}  # fmt: skip


@pytest.mark.parametrize("sync", SYNC)
def test_all_orders_are_safe_and_none_of_the_fences_is_superfluous(sync):
    recording = record_calls(sync)
    assert explore(recording) > 100
    expected = FENCES | (FENCES_OF_FLAGS if sync == "flags" else {})
    found = set()
    for name, weaker in weakened(recording):
        fence = name.rpartition(" -> ")[0]
        with pytest.raises(HazardError, match=expected[fence]):
            explore(weaker)
        found.add(fence)
    assert found == expected.keys()


HEADERS = """        if tl.program_id(0) == 0:
            _write_headers(addresses, rank, slot, layout, end_R - start_R, R, R_PADDED, SLOTS, REGION)
"""
WAIT = "    if wait_until_free(addresses, state, rank, slot, number, layout, R, SLOTS, REGION, LIMIT, CLOCK):\n"
RELEASE = "        release_last(addresses, state, rank, slot, R, R_PADDED, SLOTS, REGION, False)\n"
RELEASE_AFTER = "    release_after(windows, operation.slot, free=False)\n"
PUSH = "    push_kernel[(windows.num_sms,)](\n"
FREE_AFTER = "    release_after(windows, operation.slot, free=True)\n"
ADD = 'tl.atomic_add(state + _DONE, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1'
EPOCH = "            tl.store(state + _EPOCHS + slot, epoch)\n"
EVERY_RANK = "    for r in range(R):\n"
MISTAKES = {
    "the epoch is not stored": ("signals", {EPOCH: "            pass\n"}, OVERWRITTEN),
    "headers are written after the release": (
        "push", {HEADERS: "", RELEASE: RELEASE + HEADERS}, r"loads headers\S+ .* may be storing"
    ),
    "headers are written before the wait": (
        "push", {HEADERS: "", WAIT: HEADERS.replace("        ", "    ") + WAIT}, OVERWRITTEN
    ),
    "a message is released before it is written": (
        "push", {RELEASE_AFTER: "", PUSH: RELEASE_AFTER + PUSH}, READ_EARLY
    ),
    "a message is not released": ("push", {RELEASE_AFTER: ""}, r"nothing lets full\[0, 0\] of rank 0 become 1"),
    "a slot is not freed": (
        "receive", {f"{FREE_AFTER}\n\n@": "\n\n@"}, OVERWRITTEN
    ),
    "the first program releases": ("signals", {ADD: "tl.program_id(0) == 0"}, "nothing lets full.* become 2"),
    "a wait leaves out the last rank": ("signals", {EVERY_RANK: "    for r in range(R - 1):\n"}, READ_EARLY),
    "a wait is for an earlier message": (
        "signals", {"wait_for_all(flags, epoch,": "wait_for_all(flags, epoch - 1,"}, OVERWRITTEN,
    ),
    "ranks share a flag": (
        "signals", {"R), rank, REGION)": "R), 0, REGION)", EVERY_RANK: "    for r in range(1):\n"},
        r"free\[0, 0\] of rank 0 is written by ranks \[0, 1\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.quick("the epoch is not stored", "headers are written after the release")
def test_mistakes_in_the_kernels_are_found(mistake, monkeypatch, tmp_path):
    file, changes, message = MISTAKES[mistake]
    change_source(monkeypatch, tmp_path, file, changes)
    sync = "barrier" if {RELEASE_AFTER, f"{FREE_AFTER}\n\n@"} & changes.keys() else "flags"
    with pytest.raises(HazardError, match=message):
        explore(record(sync, BRIEF, slots=1))


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
@pytest.mark.parametrize("sync", SYNC)
def test_ranks_may_wait_in_different_orders(sync):
    starts: list[Call] = [("dispatch", 0, True), ("dispatch", 1, False), ("dispatch", 0, False)]
    prepared: list[Call] = [("prepare", 0), ("prepare", 1)]
    recordings = [record(sync, prepared + order) for order in orders((), starts, slots=2)]
    assert len(recordings) == 7
    for one, other in product(recordings, recordings):
        assert one[1:] == other[1:]
        explore(one._replace(ranks=[one.ranks[0], other.ranks[1]]))
