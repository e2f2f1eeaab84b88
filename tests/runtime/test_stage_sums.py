"""Sums of gradients and gathers of weights that run beside the pipeline, stage by stage."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_dualpipe.expert_parallel.parameters import ExpertIds
from moe_dualpipe.pipeline.pipeline import Pipeline
from moe_dualpipe.runtime import replicas
from moe_dualpipe.runtime.background import Background, covered
from moe_dualpipe.runtime.replicas import ReplicaSet, Shards, gradient_norm
from moe_dualpipe.runtime.stage_sums import GradientSums, StageOrder, WeightGathers, parts_of
from moe_dualpipe.schedule import build
from moe_dualpipe.schedule.stage_order import last_gradients, order_of_completion
from tests.machines.record_launches import record_launches, tiny_model
from tests.machines.simulated_gpu import SimulatedGpu
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
    """Of divided and of whole sums: owned gradients, all gradients, and their norm."""
    replicas.BUCKET_BYTES = bucket_bytes
    results = []
    for divide in (True, False):
        made = parameters(rank)
        shards = Shards(replica_set(made, dist.group.WORLD), divide)
        one = GradientSums([shards], ORDER, Background(CPU))
        for stage in (0, 1):
            one.complete(stage)
        owned = one.finish()
        gradients = {name: None if p.grad is None else p.grad.flatten().tolist() for name, p in made.items()}
        named = {name: grad.tolist() for name, grad in zip(shards.owned, owned, strict=True)}
        results.append((named, gradient_norm(owned, CPU).item(), gradients))
    expected = parameters(rank)
    for parameter in expected.values():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(parameter.grad)
    return *results, {name: p.grad.flatten().tolist() for name, p in expected.items()}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.quick("2")
def test_sums_are_those_of_an_all_reduce_and_each_has_one_owner(ranks):
    small, large = (run_ranks(ranks, sums, size) for size in (50, 25 * 2**20))
    for (owned, norm, divided), (same, same_norm, whole), expected in small:
        assert (owned, norm) == (same, same_norm)
        assert norm == small[0][0][1]  # the same bits on all ranks
        assert whole == expected or ranks > 2  # with more, an all-reduce adds in another order
        for name, grad in whole.items():
            assert grad == pytest.approx(expected[name], rel=2e-2 if name == "half" else 1e-5, abs=1e-3), name
        assert {name for name, grad in divided.items() if grad is not None} == {name.split(".")[0] for name in owned}
        assert norm == pytest.approx(math.sqrt(sum(x**2 for grad in whole.values() for x in grad)), rel=1e-6)
    names = [name for of_rank in small for name in of_rank[0][0]]
    assert sorted(names) == sorted(Shards(replica_set(parameters(0), None), True).tensors)
    assert [of_rank[1][2] for of_rank in small] == [of_rank[1][2] for of_rank in large]  # buckets change no bit


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
    assert replicas.assign_owners({"a": 5, "b": 3, "c": 3, "d": 1}, 2) == {"a": 0, "b": 1, "c": 1, "d": 0}


def test_a_bucket_has_a_tensor_of_each_owner_or_fits():
    sizes = {f"t{i}": size for i, size in enumerate([3, 40, 7, 30, 21, 9, 5, 28, 33, 2, 64, 11, 6])}
    owners = {name: SimpleNamespace(owner=i % 3) for i, name in enumerate(sizes)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "BUCKET_BYTES", 100)
        buckets = Shards.buckets(SimpleNamespace(num_owners=3, tensors=owners), sizes)  # type: ignore[arg-type]
    names = [name for bucket in buckets for part in bucket for name in part]
    assert sorted(names) == sorted(sizes)
    for bucket in buckets:
        assert max(map(len, bucket)) == 1 or sum(sizes[name] for part in bucket for name in part) <= 100
    assert len(buckets) < max(sum(owner == o.owner for o in owners.values()) for owner in range(3))


def gathered(_rank):
    """The owned weights, all weights of stage 1, and the weights that have their values after each wait."""
    made = parameters(0) | {
        f"{stage}{i}": nn.Parameter(torch.zeros(3 + i)) for i in range(3) for stage in ("a", "late")
    }
    shards = Shards(ReplicaSet(made, dist.group.WORLD), divide=True)
    for name in shards.owned:
        made[name].detach().fill_(1.0)
    held = {name: frozenset([int("late" in name)]) for name in made}
    gathers = WeightGathers([shards], StageOrder(held, (), (0, 1)), Background(CPU))
    gathers.start()
    seen = []
    for stage in (1, 0, None):
        gathers.wait(stage)
        seen.append({name for name, p in made.items() if (p == 1).all()})
    late = {name for name in made if "late" in name}
    assert seen == [late | {*shards.owned}, {*made}, {*made}] and seen[0] != seen[1]
    return [*shards.owned], len(made)


def test_weights_of_a_stage_arrive_when_it_is_waited_for():
    (one, number), (other, _) = run_ranks(2, gathered)
    assert len({*one, *other}) == len(one) + len(other) == number


# ---- Schedules ----


@pytest.mark.parametrize("name,ranks", [("dualpipe", 2), ("zbv", 3), ("interleaved_1f1b", 2)])
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
    for rank, seen in enumerate(events):
        actions = schedule.actions[rank // 2]
        last = {stage: seen.index(action) for stage, action in last_gradients(actions).items()}
        order = [*dict.fromkeys(event for event in seen if isinstance(event, int))]
        assert order == [stage for stage in order_of_completion(schedule) if stage in last]
        assert all(seen.index(stage) > end for stage, end in last.items())
        assert seen.index(order[0]) < seen.index(actions[-1])


# ---- Times, and the GPU ----


def test_the_time_of_collectives_that_overlap_counts_once():
    assert covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5)]) == 4.0
    assert covered([]) == 0


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


def test_on_a_gpu_the_streams_wait_for_each_other(monkeypatch):
    replace_devices(monkeypatch)
    with SimulatedGpu() as gpu:
        group = TwoRanks(gpu)
        monkeypatch.setattr(dist, "get_rank", lambda group: group.rank())
        for name in ("reduce_scatter", "all_gather"):
            monkeypatch.setattr(dist, name, getattr(group, name))
        made = {name: nn.Parameter(torch.zeros(4)) for name in "ab"}
        for divide, expected in ((False, [8.0, 20.0]), (True, [8.0, None])):
            shards = Shards(ReplicaSet(made, group), divide)  # type: ignore[arg-type]
            for parameter in made.values():
                parameter.grad = torch.ones(4)
            sums = GradientSums([shards], StageOrder({}), Background(CPU))
            sums.start_all()
            busy = [torch.ones(4) * i for i in range(9)]  # may reuse memory that is free
            sums.finish()
            assert [p.grad.sum().item() if p.grad is not None else None for p in made.values()] == expected
            del busy
        gathers = WeightGathers([shards], StageOrder({}), Background(CPU))
        gathers.start()
        gathers.wait(0)  # no stage holds these parameters, so each may use them
        assert [p.sum().item() for p in made.values()] == [0.0, 20.0]
