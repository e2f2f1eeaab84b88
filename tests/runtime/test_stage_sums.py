"""Sums of gradients and gathers of weights that run beside the pipeline, stage by stage."""

import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_dualpipe.expert_parallel.parameters import ExpertIds
from moe_dualpipe.pipeline.pipeline import Pipeline
from moe_dualpipe.pipeline.record_launches import record_launches, tiny_model
from moe_dualpipe.runtime import background, zero
from moe_dualpipe.runtime.background import Background, covered
from moe_dualpipe.runtime.replicas import ReplicaSet, gradient_norm, sum_gradients
from moe_dualpipe.runtime.stage_sums import GradientSums, StageOrder, WeightGathers, parts_of
from moe_dualpipe.runtime.zero import Shards
from moe_dualpipe.schedule import build, members
from moe_dualpipe.schedule.stage_order import last_gradients, order_of_completion
from tests.machines.simulated_gpu import RaceError, SimulatedGpu
from tests.support.ranks import run_ranks
from tests.support.simulated_ranks import Work, queue, replace_devices

CPU = torch.device("cpu")
SHAPES = {"a": (13, 3), "b": (5,), "experts": (3, 4, 2), "c": (), "late": (7, 11), "unused": (2, 3), "half": (9,)}
HELD = {name: frozenset([int(name in ("late", "unused"))]) for name in SHAPES}
ORDER = StageOrder(HELD, completion=(1, 0), use=(0, 1))


def parameters(seed):
    """Parameters with random gradients of very different sizes, so that the order of additions shows."""
    generator = torch.Generator().manual_seed(seed)
    made = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    made["half"] = nn.Parameter(torch.zeros(9, dtype=torch.bfloat16))
    for name, parameter in made.items():
        if name != "unused":
            sizes = 10 ** torch.randint(-3, 4, parameter.shape, generator=generator)
            parameter.grad = (torch.randn(parameter.shape, generator=generator) * sizes).to(parameter.dtype)
    return made


def replica_set(made, group):
    return ReplicaSet(made, group, {"experts": ExpertIds(range(4, 7), "stacked", "experts.*")})


def sums(rank, bucket_bytes):
    """For divided and whole sums: owned gradients, all gradients, their norm, and the numbers of elements sent."""
    zero.BUCKET_BYTES = bucket_bytes
    results = {}
    for divide in (True, False):
        made, sent, calls = parameters(rank), Counter(), []
        shards = Shards(replica_set(made, dist.group.WORLD), divide)
        with pytest.MonkeyPatch.context() as patch:
            for name, size in (("all_to_all_single", sent_to_others), ("broadcast", sent_by_owner)):
                patch.setattr(dist, name, counted(getattr(dist, name), name, size, sent, calls))
            one = GradientSums([shards], ORDER, Background(CPU))
            one.complete(0)
            assert not calls  # stage 1 is first on all ranks
            one.complete(1)
            assert calls
            owned = one.finish()
        gradients = {name: None if p.grad is None else p.grad.flatten().tolist() for name, p in made.items()}
        norm = gradient_norm(owned, CPU).item()
        owned = {name: grad.tolist() for name, grad in zip(shards.owned, owned, strict=True)}
        results[divide] = owned, gradients, norm, sent
    expected = parameters(rank)
    sum_gradients(replica_set(expected, dist.group.WORLD))
    return results, {name: p.grad.flatten().tolist() for name, p in expected.items()}


def sent_to_others(_received, _given, _sizes_in, sizes_out, **_):
    return sum(sizes_out) - sizes_out[dist.get_rank()]


def sent_by_owner(tensor, group_src, **_):
    return tensor.numel() * (group_src == dist.get_rank())


def counted(operation, name, size, sent, calls):
    def call(*arguments, async_op, **options):
        assert async_op
        sent[name] += size(*arguments, **options)
        calls.append(name)
        return operation(*arguments, async_op=True, **options)

    return call


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.quick("2")
def test_sums_are_those_of_an_all_reduce_and_each_has_one_owner(ranks):
    seen = [run_ranks(ranks, sums, size) for size in (50, 25 * 2**20)]
    for results, expected in seen[0]:
        (owned, divided, norm, sent), (same, whole, same_norm, _) = results[True], results[False]
        assert (owned, norm) == (same, same_norm)
        assert norm == seen[0][0][0][True][2]  # the same bits on all ranks
        of_owned = {tensor.split(".")[0] for tensor in owned}
        assert {name for name, grad in divided.items() if grad is not None} == of_owned
        assert whole == expected or ranks > 2  # with more, an all-reduce adds in another order
        for name, grad in whole.items():
            assert grad == pytest.approx(expected[name], rel=2e-2 if name == "half" else 1e-5, abs=1e-3), name
        assert sent.keys() == {"all_to_all_single"}  # with ZeRO, gradients are not gathered
    whole = seen[0][0][0][False][1]
    elements = sum(map(len, whole.values()))
    # Each gradient is sent to its owner once; an all-reduce would send it on to the others, as without ZeRO.
    assert sum(of_rank[True][3]["all_to_all_single"] for of_rank, _ in seen[0]) == (ranks - 1) * elements
    assert sum(of_rank[False][3]["broadcast"] for of_rank, _ in seen[0]) == elements
    names = [name for of_rank, _ in seen[0] for name in of_rank[True][0]]
    assert sorted(names) == sorted(Shards(replica_set(parameters(0), None), True).tensors)
    norm = math.sqrt(sum(number**2 for grad in whole.values() for number in grad))
    assert seen[0][0][0][True][2] == pytest.approx(norm, rel=1e-6)
    for (small, _), (large, _) in zip(*seen, strict=True):
        assert small[False][1] == large[False][1]  # sums do not depend on the buckets


def test_parameters_of_several_stages_wait_for_the_last_of_them(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda _: 0)
    made = {name: nn.Parameter(torch.zeros(3)) for name in ("both", "first", "last")}
    shards = Shards(ReplicaSet(made, SimpleNamespace(size=lambda: 2)), True)
    held = {"first": frozenset([0]), "both": frozenset([0, 1]), "last": frozenset([1])}
    for order, names in (((1, 0), ["last", "both", "first"]), ((0, 1), ["first", "both", "last"])):
        assert [part.parameters for part in parts_of(shards, held, order)] == [(name,) for name in names]
    started, sums = [], GradientSums([shards], StageOrder(held, (0, 1)), Background(CPU))
    sums._start = lambda part: started.append(*part.parameters)
    for stage, names in ((0, ["first"]), (1, ["first", "both", "last"])):
        sums.complete(stage)
        assert started == names


def test_the_largest_tensor_goes_to_the_owner_with_the_least():
    assert zero.assign_owners({"a": 5, "b": 3, "c": 3, "d": 1}, 2) == {"a": 0, "b": 1, "c": 1, "d": 0}


def test_a_bucket_has_a_tensor_of_each_owner_or_fits():
    sizes = {f"t{i}": size for i, size in enumerate([3, 40, 7, 30, 21, 9, 5, 28, 33, 2, 64, 11, 6])}
    owners = {name: SimpleNamespace(owner=i % 3) for i, name in enumerate(sizes)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero, "BUCKET_BYTES", 100)
        buckets = Shards.buckets(SimpleNamespace(num_owners=3, tensors=owners), sizes)  # type: ignore[arg-type]
    names = [name for bucket in buckets for part in bucket for name in part]
    assert sorted(names) == sorted(sizes)
    for bucket in buckets:
        assert max(map(len, bucket)) == 1 or sum(sizes[name] for part in bucket for name in part) <= 100
    assert len(buckets) < max(sum(owner == o.owner for o in owners.values()) for owner in range(3))


def gathered(_rank):
    """The values of all weights before, between and after the waits."""
    made = parameters(0)
    for name in ("a", "late"):  # several tensors, so that each rank owns some
        made |= {f"{name}{i}": nn.Parameter(torch.zeros(3 + i)) for i in range(3)}
    shards = Shards(ReplicaSet(made, dist.group.WORLD), divide=True)
    for name in shards.owned:
        made[name].detach().fill_(1.0)
    held = {name: frozenset([int("late" in name)]) for name in made}
    gathers = WeightGathers([shards], StageOrder(held, (), (0, 1)), Background(CPU))
    gathers.start()
    seen = [{name for name, p in made.items() if (p == 1).all()}]
    for stage in (1, 0, None):
        gathers.wait(stage)
        seen.append({name for name, p in made.items() if (p == 1).all()})
    return {*shards.owned}, {name for name in made if "late" in name}, {*made}, seen


def test_weights_of_a_stage_arrive_when_it_is_waited_for():
    owners = run_ranks(2, gathered)
    for owned, late, everything, seen in owners:
        assert seen == [owned, owned | late, everything, everything]
    assert owners[0][0] | owners[1][0] == owners[0][2] and not owners[0][0] & owners[1][0]


# ---- Schedules ----

DRAINING = [("dualpipe", 4), ("chimera", 4), ("dualpipev", 3), ("zbv", 3), ("interleaved_1f1b", 2)]


@pytest.mark.parametrize("name,ranks", DRAINING)
def test_the_sums_of_a_stage_start_after_its_last_backward_and_before_the_last_action(name, ranks):
    schedule = build(name, ranks, 2 * ranks, 2 if "interleaved" in name else None)
    events = [[] for _ in range(2 * ranks)]

    def observe(rank: int, pipeline: Pipeline) -> None:
        start = pipeline.background.start

        def started(operations):
            if pipeline.background.starting.startswith("sum"):
                events[rank].append(int(pipeline.background.starting.split()[-1]))
            return start(operations)

        pipeline.executor.on_action = events[rank].append
        pipeline.background.start = started  # type: ignore[method-assign]

    record_launches(tiny_model(schedule.num_stages, ep=2), schedule, 2, queued=False, change=observe)
    early = 0
    for rank, seen in enumerate(events):
        actions = schedule.actions[rank // 2]
        assert [event for event in seen if not isinstance(event, int)] == [*actions]
        last = {stage: seen.index(action) for stage, action in last_gradients(actions).items()}
        sums = {stage: seen.index(stage) for stage in last}
        assert all(sums[stage] > last[stage] for stage in last)
        assert [*dict.fromkeys(event for event in seen if isinstance(event, int))] == [
            stage for stage in order_of_completion(schedule) if stage in last
        ]
        early += min(sums.values()) < seen.index(actions[-1])
        assert {member.stage for member in members(actions[-1])} <= {*last}
    assert early == 2 * ranks


# ---- Times, and the GPU ----


def test_the_time_of_collectives_that_overlap_counts_once():
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5)]) == 4.0
    assert covered([]) == 0


def test_exposed_time_is_that_of_waits(monkeypatch):
    clock = iter([0.0, 3.0, 10.0, 14.0])
    monkeypatch.setattr(background, "perf_counter", lambda: next(clock))
    one = Background(CPU)
    done = torch.futures.Future()
    done.set_result(None)
    running = one.start(lambda: [SimpleNamespace(wait=lambda: None, get_future=lambda: done), None])  # type: ignore[list-item]
    one.wait([running])  # started at 0, done at 3, waited for from 10 to 14
    assert one.take_times() == background.Times(running=3.0, exposed=4.0)
    assert one.take_times() == background.Times(0, 0)


class TwoRanks:
    """Rank 0 of two that pass the same tensors, on a simulated GPU."""

    def __init__(self, gpu):
        self.stream = gpu.Stream(name="nccl")

    def size(self):
        return 2

    def rank(self):
        return 0

    def reduce_scatter(self, output, inputs, group, async_op):
        output.numpy()[:] = 2 * inputs[0].numpy()
        return Work(queue(self.stream, "reduce_scatter", inputs, [output]), [output, *inputs])

    def all_gather(self, outputs, given, group, async_op):
        outputs[1].numpy()[:] = 5
        return Work(queue(self.stream, "all_gather", [given], outputs), [*outputs, given])


def on_a_gpu(monkeypatch):
    replace_devices(monkeypatch)
    with SimulatedGpu() as gpu:
        group = TwoRanks(gpu)
        monkeypatch.setattr(dist, "get_rank", lambda group: group.rank())
        for name in ("reduce_scatter", "all_gather"):
            monkeypatch.setattr(dist, name, getattr(group, name))
        made = {name: nn.Parameter(torch.zeros(4)) for name in "ab"}
        shards = [Shards(ReplicaSet(made, group), divide) for divide in (True, False)]  # type: ignore[arg-type]
        found = []
        for one in shards:
            for parameter in made.values():
                parameter.grad = torch.ones(4)
            sums = GradientSums([one], StageOrder({}), Background(CPU))
            sums.start_all()
            busy = [torch.ones(4) * i for i in range(9)]  # may reuse memory that is free
            sums.finish()
            found.append([p.grad.sum().item() if p.grad is not None else None for p in made.values()])
            del busy
        gathers = WeightGathers(shards[:1], StageOrder({}), Background(CPU))
        gathers.start()
        gathers.wait(0)  # no stage holds these parameters, so each may use them
        return found, [p.sum().item() for p in made.values()]


def test_on_a_gpu_the_streams_wait_for_each_other(monkeypatch):
    assert on_a_gpu(monkeypatch) == ([[8.0, None], [8.0, 20.0]], [0.0, 20.0])


@pytest.mark.parametrize("fault", ["the results are read too early", "the gradients are sent too early"])
def test_on_a_gpu_a_missing_wait_is_found(monkeypatch, fault):
    if "read" in fault:
        monkeypatch.setattr(background._OnStream, "wait", lambda _: None)
    else:
        monkeypatch.setattr("tests.machines.simulated_gpu.SimulatedStream.wait_event", lambda *_: None)
    with pytest.raises(RaceError):
        on_a_gpu(monkeypatch)
