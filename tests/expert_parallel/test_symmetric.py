"""Symmetric gives the results of AllToAll bit for bit, between processes that run its kernels in the interpreter.

All memory that no kernel has written is NaN: the windows before their first use, and the rows past the received ones.
It explains what failed and who is missing, and runs the transfers of several streams in order.

No order of the programs of two ranks makes it read a message early, overwrite one that is read, or deadlock. The check
uses events that the real kernels recorded (tests/machines/one_sided/record.py), not a model of them. If any fence of
the kernels is removed or weakened, it finds what goes wrong.
"""

import dataclasses
import types
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch.distributed import DistError

pytest.importorskip("triton")

from tests.machines.interpreter import prepare_rank
from tests.machines.one_sided.record import CALLS, Call, record
from tests.machines.one_sided.search import explore
from tests.machines.one_sided.weaken import check_fences
from tests.support.ranks import run_ranks
from tests.support.symmetric_ranks import EXPERTS, TOKENS, TOP_K, WIDTH, build, layers_agree, needs_interpreter, rounds

pytestmark = needs_interpreter


@pytest.mark.parametrize("ranks,seeds", [(2, range(2)), *((ranks, range(100, 130)) for ranks in (1, 2, 4))])
@pytest.mark.quick("2-seeds0")
def test_results_are_those_of_all_to_all_bit_for_bit(ranks, seeds):
    run_ranks(ranks, rounds, ranks, seeds, timeout=600)


@pytest.mark.quick("ours")
@pytest.mark.parametrize("choices", [{}, {"experts": "tests.support.kernels:LinearExperts"}], ids=["ours", "custom"])
def test_a_layer_and_its_gradients_equal_those_of_all_to_all(choices):
    run_ranks(2, layers_agree, choices)


# ---- Failures ----


def send(ep, expert_ids, dtype=torch.float32, width=WIDTH):
    """Dispatch a token for each of `expert_ids`."""
    route = ep.prepare(torch.tensor(expert_ids)[:, None])
    return ep.dispatch(torch.ones(len(expert_ids), width).to(dtype), route)


def set_timeout(ep, seconds):
    ep.windows = dataclasses.replace(ep.windows, timeout=seconds)


def fails(message, call, error=DistError):
    with pytest.raises(error) as found:
        call()
    assert str(found.value).startswith(message)


NO_ANSWER = "no answer from rank 1 for 0.01 s before"


def capacity(rank):
    """Both ranks send to experts of rank 1: at first as many rows as it can receive, then one more."""
    ep = build(capacity=5)
    send(ep, [4, 6, 5] if rank else [6, 6]).wait()
    if rank == 0:
        send(ep, [6, 7, 6]).wait()
        set_timeout(ep, 0.01)
        fails(f"{NO_ANSWER} it", lambda: send(ep, [0]).wait())
        return
    pending = send(ep, [4, 6, 5])
    for again in (pending.wait, pending.wait, lambda: ep.prepare(torch.tensor([[0]])), ep.check):
        fails(
            "rank 1 was sent 6 rows (3 from rank 0, 3 from rank 1), but its capacity is 5. Expert 6 was chosen most "
            "often: 3 times. Increase capacity, or balance the load", again, RuntimeError,
        )  # fmt: skip


def missing(rank):
    """Rank 1 leaves out an operation, or does not wait for one."""
    ep = build(timeout=0.01)
    if rank == 0:
        fails(f"{NO_ANSWER} its dispatch (operation 0)", lambda: send(ep, [0]).wait())
    ep = build(slots=1)
    pending = send(ep, [0])
    torch.distributed.barrier()
    if rank == 0:
        pending.wait()
        set_timeout(ep, 0.01)
        fails(f"{NO_ANSWER} it freed a slot for dispatch (operation 1)", lambda: send(ep, [0]))


def different(rank):
    ep = build()
    route = ep.prepare(torch.tensor([[0]]))
    y = ep.dispatch(torch.ones(1, WIDTH), route).wait().x_ND
    mine, other = ("combine", "dispatch") if rank else ("dispatch", "combine")
    pending = ep.combine(y, route) if rank else ep.dispatch(torch.ones(1, WIDTH), route)
    said = f"rank {rank} waits for its {mine} (operation 1), but rank {1 - rank} called {other}"
    fails(f"{said}: all ranks must call the same operations in the same order", pending.wait, RuntimeError)
    torch.distributed.barrier()
    pending = send(build(), [0], (torch.float32, torch.bfloat16)[rank])
    said = f"rank {rank} waits for its dispatch (operation 0), but rank {1 - rank} called dispatch"
    fails(f"{said} with other fields or rows of another size: ", pending.wait, RuntimeError)
    torch.distributed.barrier()


def misuse(rank):
    ep, busy = build(), build(slots=1)
    route, waiting = ep.prepare(torch.tensor([[0]])), busy.prepare(torch.tensor([[0]]))
    row, rows = torch.ones(1, WIDTH), r"rows must be multiples of 16 bytes, at most 64: got"
    pending = busy.dispatch(row, waiting)
    for refused, message in (
        (lambda: ep.prepare(torch.zeros(TOKENS + 1, 1).long()), "max_tokens is 6, but this rank has 7 tokens"),
        (lambda: ep.prepare(torch.zeros(1, TOP_K + 1).long()), "top_k is 3, but a token has 4 choices"),
        (lambda: ep.prepare(torch.tensor([[EXPERTS]])),
         "expert ids must be from 0 to 7, or -1 for no expert: got 8 for token 0"),
        (lambda: send(ep, [0], width=WIDTH + 4), f"{rows} {WIDTH + 4} elements"),
        (lambda: send(ep, [0], torch.bfloat16, WIDTH + 1), f"{rows} {WIDTH + 1} elements"),
        (lambda: send(ep, [0], torch.float64), r"rows must be in bfloat16, float16 or float32: got torch\.float64"),
        (lambda: ep.dispatch(torch.ones(2, WIDTH), route), "this route has 1 rows: got 2"),
        (lambda: ep.dispatch(row, route, torch.ones(1, 1).half()), "weights must be in float32: got torch.float16"),
        (lambda: ep.combine(torch.ones(ep.capacity, WIDTH), route), "wait for its first dispatch"),
        (lambda: busy.dispatch(row, waiting), "1 transfers are in flight: wait for the first of them"),
        (lambda: build(slots=0), "slots must be at least 1: got 0"),
        (lambda: build(top_k=1 + rank), "top_k must be the same on all ranks: got 1, 2"),
    ):  # fmt: skip
        with pytest.raises((ValueError, RuntimeError), match=message):
            refused()
    assert pending.wait().x_ND is pending.wait().x_ND


def all_failures(rank):
    prepare_rank(pytest.MonkeyPatch())
    for check in (capacity, missing, different, misuse):
        check(rank)
        torch.distributed.barrier()


def test_failures_are_explained():
    run_ranks(2, all_failures)


# ---- GPUs, which are not here ----


class Stream:
    """A stream that records what it is told."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def record_event(self):
        self.log.append(f"{self.name} records")
        return f"the event of {self.name}"

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")


def in_order(_rank):
    """Transfers of two streams run one after another, and only `check` waits for them."""
    prepare_rank(pytest.MonkeyPatch())
    ep, log, captured = build(), [], [False]
    current = one = Stream("one", log)
    module = types.SimpleNamespace(
        current_stream=lambda _device: current, is_current_stream_capturing=lambda: captured[0]
    )  # fmt: skip
    pytest.MonkeyPatch().setattr("moe_dualpipe.overlap.streams.streams_of", lambda _device: module)

    def logged(call):
        log.clear()
        return call(), [*log]

    first, at_first = logged(lambda: send(ep, [0]))
    current = Stream("other", log)
    second, then = logged(lambda: send(ep, [1]))
    assert at_first + then == ["one records", "other waits for the event of one", "other records"]
    assert logged(second.wait)[1] == ["other waits for the event of other", "other records"]
    current = one
    assert logged(first.wait)[1] == ["one waits for the event of other", "one records"]
    # A graph waits only for events in it, other work only for events outside, and nothing after `check`.
    for captured[0], before in ((True, []), (True, ["one waits for the event of one"]), (False, [])):
        pending, found = logged(lambda: send(ep, [0]))
        assert found == [*before, "one records"]
        pending.wait()
    assert logged(ep.check)[1] == ["one waits for the event of one"]
    assert logged(lambda: send(ep, [0]).wait())[1] == ["one records", "one waits for the event of one", "one records"]
    ep.windows.state[:5] = torch.tensor([2, 0, 1, 1, 0])
    pending = send(ep, [0])  # it reports the failure to the host, which did not know it before
    for failing in (ep.check, pending.wait, lambda: send(ep, [0])):
        with pytest.raises(DistError, match="before its dispatch"):
            failing()


def test_transfers_of_two_streams_run_in_order_without_a_host_sync():
    run_ranks(1, in_order)


# ---- Orders ----


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
