"""A backend that does not work on this machine is found by a small exchange, on all ranks, before it is used."""

import pytest
import torch
from torch.distributed import DistError, group

from moe_dualpipe.expert_parallel import AllToAll, choose, choose_backend
from moe_dualpipe.expert_parallel.choose import Choice
from moe_dualpipe.expert_parallel.protocol import Combined, Completed
from moe_dualpipe.expert_parallel.trial import try_backend
from moe_dualpipe.runtime.world import join_world
from tests.support.ranks import run_ranks
from tests.support.runs import make_trainer, settings

CPU, EXPERTS = torch.device("cpu"), 4
SIZES = {"max_tokens": 5, "hidden_size": 8, "top_k": 2, "dtype": torch.bfloat16}


class Doubles(AllToAll):
    """On rank 1, the gradients of routing weights are wrong."""

    def combine(self, y_ND, route, weight_grads_NK=None):
        y_TD, grads_TK = super().combine(y_ND, route, weight_grads_NK).wait()
        if grads_TK is not None and torch.distributed.get_rank() == 1:
            grads_TK = 2 * grads_TK
        return Completed(Combined(y_TD, grads_TK))


class Fails(AllToAll):
    """On rank 1, a transfer that runs on a GPU has failed."""

    def check(self):
        if torch.distributed.get_rank() == 1:
            raise DistError("no answer from rank 0\nand more")


def fails_to_build(num_experts, the_group, *_arguments, **_options):
    if torch.distributed.get_rank() == 0:
        raise RuntimeError("no access")
    return AllToAll(num_experts, the_group)


FAULTS = {
    Doubles: "its results differ from those of all_to_all", Fails: "DistError: no answer from rank 0",
    fails_to_build: "RuntimeError: no access",
}  # fmt: skip


def trials(_rank):
    def run(build):
        return try_backend(
            lambda: build(EXPERTS, group.WORLD), AllToAll(EXPERTS, group.WORLD), group.WORLD, CPU, **SIZES
        )

    assert isinstance(run(AllToAll)[0], AllToAll)
    for build, fault in FAULTS.items():
        assert run(build) == (None, fault)


def test_a_backend_that_fails_on_one_rank_is_refused_on_all():
    run_ranks(2, trials)


def choices(_rank):
    patch = pytest.MonkeyPatch()
    patch.setattr(choose, "decide", lambda _name, _facts: ("symmetric", "because"))
    for build, fault in FAULTS.items():
        patch.setattr(choose, "_load", lambda _name, build=build: lambda *a, **_options: build(*a))
        choice = choose_backend("auto", EXPERTS, group.WORLD, CPU, **SIZES)
        assert (choice.name, choice.reason) == ("all_to_all", f"symmetric failed its trial: {fault}")
        with pytest.raises(ValueError) as error:
            choose_backend("symmetric", EXPERTS, group.WORLD, CPU, **SIZES)
        assert str(error.value) == f"--ep-backend symmetric cannot be used: {fault}; use auto or all_to_all"
    patch.setattr(choose, "_load", lambda _name: lambda *a, **_options: AllToAll(*a))
    assert (
        str(choose_backend("auto", EXPERTS, group.WORLD, CPU, **SIZES)) == "dispatch and combine: symmetric (because)"
    )


def test_auto_goes_on_with_all_to_all_and_says_why():
    run_ranks(2, choices)


class Late:
    def check(self):
        raise DistError("late")


def test_only_transfers_that_fail_on_a_gpu_are_checked():
    with pytest.raises(DistError, match="late"):
        Choice(Late(), "symmetric", "").check()
    Choice(Late(), "all_to_all", "").check()


def test_a_step_reports_transfers_that_failed(tmp_path):
    with join_world("cpu"):
        trainer = make_trainer(0, settings(tmp_path, seq_len=8, steps=1))
        trainer.pipeline.expert_parallel = Choice(Late(), "symmetric", "")
        with pytest.raises(DistError, match="late"):
            trainer.step(0)
