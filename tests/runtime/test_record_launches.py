"""What the ranks of a pipeline launch, recorded without other processes: no schedule can hang by order."""

import random
import re
from dataclasses import fields, replace
from functools import partial

import pytest

from moe_dualpipe.runtime import P2P
from moe_dualpipe.schedule import NAMES, Recv, Send, add_comms, build, receive_early
from moe_dualpipe.schedule.comms import carried
from moe_dualpipe.schedule.walk import result_name
from tests.machines.launches import HangError, Launch, check_launches
from tests.machines.record_launches import record_launches, tiny_model


def model_for(schedule, ep, seed, mtp_layers=0):
    """Some stages have one layer more than others, some have no experts, and at least one has."""
    num_layers, numbers = schedule.num_stages + 2, random.Random(seed)
    dense = [layer for layer in range(num_layers) if numbers.random() < 0.4]
    return tiny_model(num_layers, tuple(dense[: num_layers - 1]), ep, mtp_layers)


def experts_only(programs):
    """The launches in the groups of experts."""
    return [[s for s in p if isinstance(s, Launch) and s.lane.name == "experts"] for p in programs]


def check(name, num_ranks, ep, mtp_layers=0, options=None):
    schedule = build(name, num_ranks, 2 * num_ranks)
    model = model_for(schedule, ep, f"{name} {num_ranks} {ep}", mtp_layers)
    modes = (True, False) if num_ranks < 7 else (True,)
    recorded = [record_launches(model, schedule, ep, queued, options) for queued in modes]
    early = [[s for s in steps if isinstance(s, Send | Recv)] for steps in receive_early(schedule, add_comms(schedule))]
    for rank, program in enumerate(recorded[0]):
        launched = [s.what.split()[0] for s in program if isinstance(s, Launch) and "pipeline" in s.lane.name]
        assert launched == [result_name(carried(step)) for step in early[rank // ep]]
    counts = [check_launches(programs) for programs in recorded]
    assert experts_only(recorded[0]) == experts_only(recorded[-1])  # a GPU queues, a CPU runs: the same order
    ids = range(schedule.num_micro_batches)
    links = sum(
        r.rank_of(s, m) != r.rank_of(s + 1, m) for r in [schedule] for s in range(r.num_stages - 1) for m in ids
    )
    for of_mode in counts:
        assert sum(n for lane, n in of_mode.items() if lane.name.startswith("pipeline")) == 2 * links * ep
        # Each layer and micro-batch: sizes, then dispatch and combine, forward and backward; on a group of `ep` ranks.
        calls = 5 * len(model.routed_blocks()) * len(ids) if ep > 1 else 0
        assert sum(n for lane, n in of_mode.items() if lane.name == "experts") == calls


@pytest.mark.parametrize("size", [("dualpipev", 2, 2), ("dualpipe", 2, 2, 1)], ids=str)
def test_no_rank_can_wait_forever(size):
    check(*size)


@pytest.mark.long
@pytest.mark.parametrize("num_ranks,eps", [(2, (1, 2, 4)), (3, (4,)), (4, (1, 2, 4)), (7, (2,)), (16, (2,))])
@pytest.mark.parametrize("name", NAMES)
def test_no_rank_can_wait_forever_under_any_schedule(name, num_ranks, eps):
    num_ranks -= num_ranks % 2 if name in ("chimera", "dualpipe") else 0
    for ep in eps:
        check(name, num_ranks, ep)


SCHEDULE, MODEL = build("dualpipe", 2, 4), tiny_model(4, (0,), ep=2)


def other_order_of_stages(which, rank, pipeline):
    if rank == 1:
        pipeline.order = replace(pipeline.order, **{which: getattr(pipeline.order, which)[::-1]})


def no_overlap(rank, pipeline):
    pipeline.executor.overlap = rank != 1


def one_group_for_both_directions(_, pipeline):
    """NCCL would then run the transfers of two neighbors one after the other, in two different orders."""
    links = pipeline.executor.p2p
    pipeline.executor.p2p = replace(links, downward=links.upward)


def waits_for_receives(_, pipeline):
    """Receives are posted early, so no rank may wait where it posts one."""
    links = pipeline.executor.p2p

    class Blocking(P2P):
        def recv(self, specs, source):
            transfer = super().recv(specs, source)
            transfer.wait()
            return transfer

    pipeline.executor.p2p = Blocking(**{field.name: getattr(links, field.name) for field in fields(links)})


@pytest.mark.parametrize("change,found", [
    (partial(other_order_of_stages, "completion"),
     r"dense.*: rank 0 launches sum gradients of stage (\d), .*; rank 1: sum gradients of stage (?!\1)\d, .*"),
    (partial(other_order_of_stages, "use"),
     r"dense.*: rank 0 launches gather weights of stage (\d), .*; rank 1: gather weights of stage (?!\1)\d, .*"),
    (no_overlap, r"experts.*: rank 0 launches .*; rank 1: .*"),
    (one_group_for_both_directions, r"pipeline up.*: rank 0 launches .*; rank 2: .*"),
    (waits_for_receives, r"ranks wait for each other\n"
     r"rank 0 waits for 0F2 from rank 2 to 0, float32\[1, 3, 4\]: rank 2 must launch it\n(.*\n)*"
     r"rank 2 waits for 0F0 from rank 0 to 2, float32\[1, 3, 4\]: rank 0 must launch it(.*\n?)*"),
], ids=["completion", "use", "overlap", "links", "waits"])  # fmt: skip
def test_pipelines_that_could_hang_are_found(change, found):
    with pytest.raises(HangError) as error:
        check_launches(record_launches(MODEL, SCHEDULE, 2, queued=True, change=change))
    assert re.fullmatch(r"(Lane\(name=')?" + found, str(error.value))
