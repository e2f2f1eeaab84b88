"""What the ranks of a pipeline launch, recorded without other processes: no schedule can hang by order."""

import random
import re
from dataclasses import replace
from functools import partial

import pytest

from moe_dualpipe.cli import main
from moe_dualpipe.pipeline.record_launches import record_launches, tiny_model
from moe_dualpipe.schedule import NAMES, Recv, ScheduleError, Send, add_comms, build, receive_early
from moe_dualpipe.schedule.comms import carried
from moe_dualpipe.schedule.launches import CommLaunch, check_launches
from moe_dualpipe.schedule.walk import result_name


def model_for(schedule, ep, seed, mtp_layers=0):
    """Some stages have one layer more than others, some have no experts, and at least one has."""
    num_layers, numbers = schedule.num_stages + 2, random.Random(seed)
    dense = [layer for layer in range(num_layers) if numbers.random() < 0.4]
    return tiny_model(num_layers, tuple(dense[: num_layers - 1]), ep, mtp_layers)


def experts_only(programs):
    """The launches in the groups of experts."""
    return [[s for s in p if isinstance(s, CommLaunch) and s.group.name == "experts"] for p in programs]


def check(name, num_ranks, ep, mtp_layers=0, options=None):
    schedule = build(name, num_ranks, 2 * num_ranks)
    model = model_for(schedule, ep, f"{name} {num_ranks} {ep}", mtp_layers)
    modes = (True, False) if num_ranks < 7 else (True,)
    recorded = [record_launches(model, schedule, ep, queued, options) for queued in modes]
    early = [[s for s in steps if isinstance(s, Send | Recv)] for steps in receive_early(schedule, add_comms(schedule))]
    for rank, program in enumerate(recorded[0]):
        launched = [s.what.split()[0] for s in program if isinstance(s, CommLaunch) and "pipeline" in s.group.name]
        assert launched == [result_name(carried(step)) for step in early[rank // ep]]
    counts = [check_launches(name, programs) for programs in recorded]
    assert experts_only(recorded[0]) == experts_only(recorded[-1])  # a GPU queues, a CPU runs: the same order
    ids = range(schedule.num_micro_batches)
    links = sum(
        r.rank_of(s, m) != r.rank_of(s + 1, m) for r in [schedule] for s in range(r.num_stages - 1) for m in ids
    )
    for of_mode in counts:
        assert sum(n for group, n in of_mode.items() if group.name.startswith("pipeline")) == 2 * links * ep
        # Each layer and micro-batch: sizes, then dispatch and combine, forward and backward; on a group of `ep` ranks.
        calls = 5 * len(model.routed_blocks()) * len(ids) if ep > 1 else 0
        assert sum(n for group, n in of_mode.items() if group.name == "experts") == calls


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
    make = pipeline.executor.rank_step

    def blocking(*arguments):
        step = make(*arguments)
        post = step.post_receive

        def post_and_wait(recv):
            post(recv)
            step.receiving[recv.flow][recv.stage, recv.micro_batch].wait()

        step.post_receive = post_and_wait
        return step

    pipeline.executor.rank_step = blocking


DIFFER = "run: in the group {}, the orders of launches differ\n"
CYCLE = """run: ranks wait for each other
rank 0 waits for 0F2 from rank 2 to 0, float32[1, 3, 4] (pipeline down of ranks 0, 2): rank 2 must launch it
rank 2 waits for 0F0 from rank 0 to 2, float32[1, 3, 4] (pipeline up of ranks 0, 2): rank 0 must launch it"""


@pytest.mark.parametrize("change,start,marked", [
    (partial(other_order_of_stages, "completion"), DIFFER.format("dense of ranks 0, 1, 2, 3"),
     r"> \d+ +sum gradients of stage (\d), .* +sum gradients of stage (?!\1)\d, .*"),
    (partial(other_order_of_stages, "use"), DIFFER.format("dense of ranks 0, 1, 2, 3"),
     r"> \d+ +gather weights of stage (\d), .* +gather weights of stage (?!\1)\d, .*"),
    (no_overlap, DIFFER.format("experts of ranks 0, 1"), r"> .*"),
    (one_group_for_both_directions, DIFFER.format("pipeline up of ranks 0, 2"), r"> .*"),
    (waits_for_receives, CYCLE, None),
], ids=["completion", "use", "overlap", "links", "waits"])  # fmt: skip
def test_pipelines_that_could_hang_are_found(change, start, marked):
    with pytest.raises(ScheduleError) as error:
        check_launches("run", record_launches(MODEL, SCHEDULE, 2, queued=True, change=change))
    assert str(error.value).startswith(start)
    found = [line for line in str(error.value).splitlines() if line.startswith(">")]
    assert found == [] if marked is None else re.fullmatch(marked, found[0])


@pytest.mark.parametrize("options,message", [
    ("--ep 0", "--ep must be at least 1: got 0"),
    ("--num-layers 1", "1 layer cannot be divided over 2 pipeline stages"),
    ("--dense-layers 9", "--dense-layers must be at most 3: got 9"),
    ("--num-layers 9000 --ep 4", "layers x micro-batches x ep must be at most 50,000: got 72000"),
])  # fmt: skip
def test_invalid_options_print_one_line(capsys, options, message):
    assert main(["schedule", "check", "1f1b", "--pp", "2", "--micro-batches", "2", *options.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"moe-dualpipe: error: {message}") and err.count("\n") == 1
