"""The choice of a backend: the same on all ranks of a group, with a reason, or one line that says what is wrong."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import group

from moe_dualpipe.expert_parallel import AllToAll, Local, Loopback, Shared, choose_backend
from moe_dualpipe.expert_parallel.choose import Facts, decide
from moe_dualpipe.expert_parallel.deepep import DeepEP
from moe_dualpipe.expert_parallel.symmetric import Symmetric
from moe_dualpipe.models import preset
from moe_dualpipe.pipeline.pipeline import Pipeline
from moe_dualpipe.schedule import build
from tests.support.ranks import run_ranks
from tests.support.runs import losses, records, settings, train_and_listen

CPU = Facts("cpu", "one")
GPUS = [Facts("cuda", "one", gpu, frozenset("abc") - {gpu}) for gpu in "abc"]
ELSEWHERE = replace(CPU, machine="another")
NO_PEERS = replace(GPUS[2], peers=frozenset("a"))
LACKING = replace(GPUS[1], missing=(("symmetric", "no module s"), ("deepep", "no package d")))
SEVERAL = "the ranks that share experts are on several machines"
NO_ACCESS = "the GPUs cannot access each other's memory"


@pytest.mark.parametrize(
    ("facts", "name", "reason"),
    [
        ([CPU, CPU], "shared", "CPU ranks of one machine; copies leave nothing to overlap"),
        ([CPU, CPU, ELSEWHERE], "all_to_all", SEVERAL),
        (GPUS, "symmetric", "its GPUs access each other's memory"),
        ([GPUS[0], GPUS[0]], "symmetric", "its GPUs access each other's memory"),
        ([*GPUS[:2], NO_PEERS], "all_to_all", NO_ACCESS),
        ([GPUS[0], replace(GPUS[1], machine="another")], "all_to_all", SEVERAL),
        ([GPUS[0], LACKING], "all_to_all", "no module s"),
    ],
)
def test_auto_takes_the_fastest_backend_that_all_ranks_can_use(facts, name, reason):
    assert decide("auto", facts) == (name, reason)


@pytest.mark.parametrize(
    ("name", "facts", "fault"),
    [
        ("shared", GPUS, "it is for CPUs"),
        ("shared", [CPU, ELSEWHERE], SEVERAL),
        ("symmetric", [CPU, CPU], "it needs GPUs"),
        ("symmetric", [*GPUS[:2], NO_PEERS], NO_ACCESS),
        ("symmetric", [GPUS[0], LACKING], "no module s"),
        ("deepep", [CPU, CPU], "it needs GPUs"),
        ("deepep", [GPUS[0], LACKING], "no package d"),
    ],
)
def test_a_backend_that_cannot_be_used_is_refused_in_one_line(name, facts, fault):
    with pytest.raises(ValueError) as error:
        decide(name, facts)
    assert str(error.value) == f"--ep-backend {name} cannot be used: {fault}; use auto or all_to_all"


def test_the_way_out_is_said_once():
    missing = replace(GPUS[0], missing=(("deepep", "not installed: choose --ep-backend all_to_all"),))
    with pytest.raises(ValueError, match=r"cannot be used: not installed: choose --ep-backend all_to_all$"):
        decide("deepep", [GPUS[0], missing])


@pytest.mark.parametrize("name", ["all_to_all", "deepep"])
def test_a_backend_on_request_needs_no_more_than_it_uses(name):
    other_machine = [GPUS[0], replace(NO_PEERS, machine="another")]
    assert decide(name, other_machine) == (name, "as requested")


@pytest.mark.parametrize("name", ["all_to_all", "shared", "symmetric", "deepep", "modeled"])
def test_experts_that_cannot_be_divided_evenly_are_refused(name):
    group = SimpleNamespace(size=lambda: 3, rank=lambda: 0)
    sizes = {"max_tokens": 1, "hidden_size": 8}
    build = {
        "all_to_all": AllToAll, "shared": Shared, "modeled": lambda experts, group: Loopback(experts, group.size()),
        "symmetric": partial(Symmetric, top_k=1, **sizes), "deepep": partial(DeepEP, **sizes),
    }[name]  # fmt: skip
    with pytest.raises(ValueError, match="8 experts cannot be divided evenly over 3 ranks"):
        build(8, group)


def choices(_rank):
    sizes = {"max_tokens": 8, "hidden_size": 4, "top_k": 2}
    cpu = torch.device("cpu")
    chosen = [choose_backend(name, 4, group.WORLD, cpu, **sizes) for name in ("auto", "shared", "all_to_all")]
    assert [type(choice.backend) for choice in chosen] == [Shared, Shared, AllToAll]
    assert [choice.in_background for choice in chosen] == [False, False, True]
    assert str(chosen[0]) == "dispatch and combine: shared (CPU ranks of one machine; copies leave nothing to overlap)"
    with pytest.raises(ValueError, match="--ep-backend deepep cannot be used: it needs GPUs"):
        choose_backend("deepep", 4, group.WORLD, cpu, **sizes)
    for name in ("auto", "all_to_all"):
        assert isinstance(choose_backend(name, 4, None, cpu, **sizes).backend, Local)
    with pytest.raises(ValueError, match="--ep-backend shared needs --ep 2 or more"):
        choose_backend("shared", 4, None, cpu, **sizes)
    with pytest.raises(ValueError, match=r"--ep-backend must be one of auto, all_to_all, .*: got 'nccl'"):
        choose_backend("nccl", 4, group.WORLD, cpu, **sizes)


def test_the_chosen_backend_is_built():
    run_ranks(2, choices)


def overlapped(_rank, backend):
    model = replace(preset("tiny"), num_layers=2)
    return Pipeline(model, build("dualpipev", 1, 2), (1, 8), ep=2, ep_backend=backend).executor.overlap


@pytest.mark.parametrize(("backend", "expected"), [("all_to_all", True), ("shared", False)])
def test_pairs_are_overlapped_only_if_transfers_run_in_the_background(backend, expected):
    assert run_ranks(2, overlapped, backend) == [expected, expected]


def test_a_run_gives_the_same_losses_with_another_backend_and_resumes_with_another(tmp_path):
    def run(name, backend, **changes):
        config = settings(tmp_path / name, pp=1, ep=2, ep_backend=backend, seq_len=16, **changes)
        printed = run_ranks(2, train_and_listen, config)[0]
        assert f"dispatch and combine: {backend} (as requested)\n" in printed
        return losses(records(config.checkpoint.out))

    expected = run("a", "all_to_all", steps=3)
    first = run("b", "shared", steps=2)
    checkpoint = str(tmp_path / "b" / "checkpoints" / "step-000002")
    resumed = run("c", "all_to_all", steps=3, resume=checkpoint)
    assert len(expected) == 3
    assert first | resumed == expected
