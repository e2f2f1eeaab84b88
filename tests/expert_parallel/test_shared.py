"""Shared gives the results of AllToAll bit for bit, and reports ranks that end, are late, or call something else."""

import os
import re
import signal
import socket
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import group

from moe_dualpipe.expert_parallel import AllToAll, Shared
from moe_dualpipe.expert_parallel.shared import mailbox
from moe_dualpipe.expert_parallel.shared.backend import SLOTS
from moe_dualpipe.expert_parallel.shared.memory import MIN_BYTES
from tests.support.exchanges import check_round
from tests.support.expert_ids import KINDS, random_ids
from tests.support.ranks import run_failing_ranks, run_ranks

EXPERTS = 8


def rounds(rank, ranks, seeds):
    ours, reference = Shared(EXPERTS, group.WORLD), AllToAll(EXPERTS, group.WORLD)
    common, own = (torch.Generator().manual_seed(1000 * seeds[0] + i) for i in (ranks, 100 + rank))
    for _ in seeds:
        k, width, largest, kind = (int(torch.randint(n, (), generator=common)) for n in (3, 40, 300, 4))
        dtype = (torch.float32, torch.bfloat16, torch.float64)[int(torch.randint(3, (), generator=common))]
        tokens = int(torch.randint(largest + 1, (), generator=own)) * int(torch.randint(4, (), generator=own) > 0)
        ids = random_ids(own, tokens, k + 1, KINDS[kind], EXPERTS)
        x, grads = (torch.randn(tokens, width + 1, generator=own).to(dtype) for _ in range(2))
        check_round(ours, reference, ids, x, torch.rand(ids.shape, generator=own), grads)


@pytest.mark.parametrize("ranks,seeds", [(2, range(12)), *((ranks, range(100, 200)) for ranks in (1, 2, 4))])
@pytest.mark.quick("2-seeds0")
def test_results_are_those_of_all_to_all_bit_for_bit(ranks, seeds):
    run_ranks(ranks, rounds, ranks, seeds)


def simple_route(ep):
    return ep.prepare(torch.arange(6)[:, None])


def transfers_in_flight(rank):
    """Rank 0 starts as many dispatches as there are slots before rank 1 does anything, and they grow."""
    ep, store = Shared(EXPERTS, group.WORLD), torch.distributed.distributed_c10d._get_default_store()
    widths = [3, MIN_BYTES // 4, 7, MIN_BYTES]
    assert len(widths) == SLOTS
    if rank == 1:
        store.wait(["sent"])
    for _ in range(2):  # the second time, the slots have their sizes
        routes = [simple_route(ep) for _ in widths]
        pending = [
            ep.dispatch(torch.full((6, width), float(10 * rank + i)), route)
            for i, (width, route) in enumerate(zip(widths, routes, strict=True))
        ]
        store.set("sent", "")
        for refused, message in (
            (ep.dispatch, "4 transfers are in flight: wait for one of them"),
            (ep.combine, "wait for its first dispatch"),
        ):
            with pytest.raises(RuntimeError, match=message):
                refused(torch.zeros(6, 3), routes[0])
        for i in (2, 0, 3, 1):
            x_ND = pending[i].wait().x_ND
            rows = 8 if rank == 0 else 4  # tokens 0 to 3 go to rank 0
            assert pending[i].wait().x_ND is x_ND and x_ND.shape == (rows, widths[i])
            assert x_ND[:, -1].tolist() == [i] * (rows // 2) + [10 + i] * (rows // 2)


def send_no_rows(rank):
    """All tokens go to rank 0, and the second time a row is larger than the slot."""
    ep = Shared(EXPERTS, group.WORLD)
    for width in (3, MIN_BYTES):
        route = ep.prepare(torch.zeros(2, 1, dtype=torch.int64))
        x_ND = ep.dispatch(torch.full((2, width), 1.0), route).wait().x_ND
        assert x_ND.shape == (0 if rank else 4, width)
        assert (ep.combine(x_ND, route).wait().y_TD == 1).all()


def reuse_slots_at_once(rank):
    """A sender may write into a slot again as soon as it is told that it is free: here, it does at that moment."""
    ep, peer, freed = Shared(EXPERTS, group.WORLD), 1 - rank, 0
    post, link = ep._mailbox.post, ep._links[peer]

    def overwrite_and_post(peer, notice, file=None):
        nonlocal freed
        for slot in (slot for slot in link.read if notice.freed >> slot & 1):
            link.read[slot]._memory[:] = bytes(link.read[slot].bytes)
            freed += 1
        post(peer, notice, file)

    ep._mailbox.post = overwrite_and_post

    def dispatch(number):
        return number, ep.dispatch(torch.full((6, 3), 10.0 * number + rank + 1), simple_route(ep))

    late = dispatch(0)
    for number in range(1, 30):
        last = dispatch(number)
        # Now and then the first transfer waits while later ones, whose notices follow its own, are received.
        for sent, pending in (last, late) if number % 5 == 0 else (last,):
            assert pending.wait().x_ND.unique().tolist() == [10.0 * sent + 1, 10.0 * sent + 2]
        late = dispatch(number + 1000) if number % 5 == 0 else late
    assert freed > 20 and len(link.written) < 2 * SLOTS


@pytest.mark.parametrize("check", [transfers_in_flight, send_no_rows, reuse_slots_at_once])
def test_messages_of_any_size_may_be_sent_ahead_and_a_slot_is_free_after_its_rows_have_been_copied(check):
    run_ranks(2, check)


def wait_in_another_order(rank, seed):
    """Each rank waits for its transfers in an order of its own, so it has read others of its peer's messages."""
    ep, ranks = Shared(EXPERTS, group.WORLD), group.WORLD.size()
    choose, pending = torch.Generator().manual_seed(10 * seed + rank), {}
    for number in range(60):
        pending[number] = ep.dispatch(torch.full((8, 3), 10.0 * number + rank), ep.prepare(torch.arange(8)[:, None]))
        while len(pending) == SLOTS or (pending and torch.rand((), generator=choose) < 0.5):
            oldest = [*pending][int(torch.randint(len(pending), (), generator=choose))]
            rows = pending.pop(oldest).wait().x_ND[:, 0].tolist()
            assert rows == sorted([10.0 * oldest + r for r in range(ranks)] * (8 // ranks))


@pytest.mark.parametrize("seed", range(3))
def test_a_slot_is_always_free(seed):
    run_ranks(4, wait_in_another_order, seed)


# ---- failures ----


def call_different_operations(rank, difference):
    ep = Shared(EXPERTS, group.WORLD)
    route = simple_route(ep)
    y_ND = ep.dispatch(torch.ones(6, 3), route).wait().x_ND
    if difference == "operation":
        [ep.dispatch(torch.ones(6, 3), route) if rank else ep.combine(y_ND, route)][0].wait()
    ep.dispatch(torch.ones(6, 3, dtype=(torch.float16, torch.bfloat16)[rank]), route).wait()


@pytest.mark.parametrize("difference", ["operation", "dtype"])
def test_ranks_that_call_different_operations_say_so(difference):
    errors = run_failing_ranks(2, call_different_operations, difference)
    operations = ("combine", "dispatch") if difference == "operation" else ("dispatch", "dispatch")
    rows = " with rows of another width or dtype" * (difference != "operation")
    for rank, error in enumerate(errors):
        expected = (
            rf"rank {rank} waits for its {operations[rank]} \(operation 1\), but rank {1 - rank} called "
            rf"{operations[1 - rank]}{rows}: "
        )
        assert re.search(expected, error) or not error, error
    assert any(errors)


def test_notices_of_others_do_not_extend_the_wait_for_a_rank(monkeypatch):
    """Without processes: rank 1 sends a notice every 0.4 s, and rank 2, which is waited for, sends none."""
    now, given = [0.0], []

    def poll(milliseconds):
        given.append(milliseconds)
        now[0] += 0.4
        assert len(given) < 9, "the wait does not end"
        return [(7, 1)] if milliseconds > 0 else []

    monkeypatch.setattr(mailbox.time, "monotonic", lambda: now[0])
    one: Any = object.__new__(mailbox.Mailbox)
    one.__dict__ |= {"names": [0, 1, 2], "timeout": 1.0, "_ended": set(), "_peers": {7: 1}}
    one._poll, one._receive = SimpleNamespace(poll=poll), lambda _: None
    with pytest.raises(torch.distributed.DistError, match=r"^no answer from rank 2 for 1 s before its dispatch$"):
        one.wait(lambda: [2], "its dispatch")
    assert given == pytest.approx([1000, 600, 200, 0])


def be_killed(rank, folder):
    """Rank 1 ends by SIGKILL while its memory and its sockets are in use."""
    tempfile.tempdir = folder
    ep = Shared(EXPERTS, group.WORLD)
    route = simple_route(ep)
    y_ND = ep.dispatch(torch.ones(6, 3000), route).wait().x_ND
    last = ep.dispatch(torch.ones(6, 3), route)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    last.wait()  # what the other rank sent before its end arrives
    ep.combine(y_ND, route).wait()


def test_a_rank_that_is_killed_is_named_at_once_and_leaves_nothing(tmp_path):
    before = {*Path("/dev/shm").glob("*")}
    survivor, killed = run_failing_ranks(2, be_killed, str(tmp_path))
    assert survivor.endswith("DistError: rank 1 ended before its combine (operation 2)\n") and killed == ""
    assert not [*tmp_path.iterdir()]
    assert not {p for p in {*Path("/dev/shm").glob("*")} - before if "moe" in p.name}


def test_a_stranger_who_connects_does_not_keep_a_rank_waiting(monkeypatch):
    """One says nothing, and one says something else; they come before the rank that is waited for."""
    outside = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
    quiet, loud, peer = outside

    def gather(own, _group):
        for one in outside:
            one.connect(own[0])
        loud.sendall(bytes(1000))
        peer.sendall(mailbox._HELLO.pack(1, own[1]))
        return [own, own]

    monkeypatch.setattr(mailbox, "gather_objects", gather)
    sockets = mailbox._connect(SimpleNamespace(rank=lambda: 0, size=lambda: 2), timeout=2.0)  # pyright: ignore
    assert list(sockets) == [1]
    peer.sendall(b"notice")
    assert sockets[1].recv(6) == b"notice" and quiet.recv(1) == b""
    for one in (*sockets.values(), *outside):
        one.close()
