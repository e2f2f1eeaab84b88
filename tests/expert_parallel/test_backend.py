"""The choice of a backend: the same on all ranks of a group, tried before it is used, with a reason or one line."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import DistError, group

from moe_dualpipe.expert_parallel import AllToAll, Combined, Completed, Local, Loopback, Shared, backend, choose_backend
from moe_dualpipe.expert_parallel.backend import decide
from moe_dualpipe.expert_parallel.deepep import DeepEP
from moe_dualpipe.expert_parallel.rank_facts import RankFacts
from moe_dualpipe.expert_parallel.symmetric import Symmetric
from moe_dualpipe.expert_parallel.trial import try_backend
from moe_dualpipe.models import preset
from moe_dualpipe.pipeline import Parallel, Pipeline
from moe_dualpipe.schedule import build
from tests.support.ranks import run_ranks

CPU = RankFacts("cpu", "one")
GPUS = [RankFacts("cuda", "one", gpu, frozenset("abc") - {gpu}) for gpu in "abc"]
ELSEWHERE = replace(CPU, machine="another")
NO_PEERS = replace(GPUS[2], peers=frozenset("a"))
OTHER_MACHINE = [GPUS[0], replace(NO_PEERS, machine="another")]
LACKING = replace(GPUS[1], missing="no d: choose --ep-backend all_to_all")
SEVERAL = "the ranks that share experts are on several machines"
NO_ACCESS = "the GPUs cannot access each other's memory"
PADDED = "its messages are padded, too much for more than 16 ranks that share experts: got 17"
ACCESS = "its GPUs access each other's memory"
# Of a name and the facts of each rank: the backend and the reason, or what is wrong and the way out.
DECISIONS = [
    ("auto", [CPU, CPU], ("shared", "CPU ranks of one machine; copies leave nothing to overlap")),
    ("auto", [CPU, CPU, ELSEWHERE], ("all_to_all", SEVERAL)),
    ("auto", GPUS, ("symmetric", ACCESS)),
    ("auto", [GPUS[0], GPUS[0]], ("symmetric", ACCESS)),
    ("auto", [*GPUS[:2], NO_PEERS], ("all_to_all", NO_ACCESS)),
    ("auto", [GPUS[0], replace(GPUS[1], machine="another")], ("all_to_all", SEVERAL)),
    ("all_to_all", OTHER_MACHINE, ("all_to_all", "as requested")),
    ("deepep", OTHER_MACHINE, ("deepep", "as requested")),
    ("shared", GPUS, "it is for CPUs; use auto or all_to_all"),
    ("shared", [CPU, ELSEWHERE], f"{SEVERAL}; use auto or all_to_all"),
    ("symmetric", [CPU, CPU], "it needs GPUs; use auto or all_to_all"),
    ("symmetric", [*GPUS[:2], NO_PEERS], f"{NO_ACCESS}; use auto or all_to_all"),
    ("copy_engine", GPUS, ("copy_engine", "as requested")),
    ("copy_engine", GPUS[:1] * 16, ("copy_engine", "as requested")),
    ("copy_engine", GPUS[:1] * 17, f"{PADDED}; use auto or all_to_all"),
    ("copy_engine", [CPU, CPU], "it needs GPUs; use auto or all_to_all"),
    ("deepep", [CPU, CPU], "it needs GPUs; use auto or all_to_all"),
    ("deepep", [GPUS[0], LACKING], "no d: choose --ep-backend all_to_all"),
]


@pytest.mark.parametrize("name,facts,expected", DECISIONS)
def test_auto_takes_the_fastest_backend_that_all_ranks_can_use_and_others_are_refused(name, facts, expected):
    if isinstance(expected, tuple):
        assert decide(name, facts) == expected
    else:
        with pytest.raises(ValueError) as error:
            decide(name, facts)
        assert str(error.value) == f"--ep-backend {name} cannot be used: {expected}"


# ---- the trial ----


class Doubles(AllToAll):
    """On rank 1, the gradients of routing weights are wrong."""

    def combine(self, y_ND, route, weight_grads_NK=None):
        y_TD, grads_TK = super().combine(y_ND, route, weight_grads_NK).wait()
        if grads_TK is not None and torch.distributed.get_rank() == 1:
            grads_TK = 2 * grads_TK
        return Completed(Combined(y_TD, grads_TK))


class Overtaken(AllToAll):
    """On rank 1, one of the later messages is what came before it. With flags of a kernel, none is."""

    flags = "copies"

    def dispatch(self, x_TD, route, weights_TK=None):
        received = super().dispatch(x_TD, route, weights_TK).wait()
        if torch.distributed.get_rank() == 1 and self.flags == "copies" and (x_TD == 51).all():
            received = received._replace(x_ND=received.x_ND - 2)
        return Completed(received)


def overtaken(*args, flags="copies", **_options):
    ep = Overtaken(*args)
    ep.flags = flags
    return ep


class Fails(AllToAll):
    """On rank 1, a transfer that runs on a GPU has failed."""

    def check(self):
        if torch.distributed.get_rank() == 1:
            raise DistError("no answer from rank 0\nand more")


def fails_to_build(num_experts, the_group, *_arguments, **_options):
    if torch.distributed.get_rank() == 0:
        raise RuntimeError("no access")
    return AllToAll(num_experts, the_group)


LATE = "rows were read before they had arrived"
FAULTS = {
    Doubles: "its results differ from those of all_to_all", Fails: "DistError: no answer from rank 0",
    fails_to_build: "RuntimeError: no access", overtaken: LATE,
}  # fmt: skip
DEVICE, EXPERTS = torch.device("cpu"), 4
SIZES = {"max_tokens": 8, "hidden_size": 4, "top_k": 2, "dtype": torch.bfloat16}


def chosen(name, ranks):
    return choose_backend(name, EXPERTS, ranks, DEVICE, **SIZES)


def choices(_rank):
    """A backend that fails on one rank is refused on all, and auto goes on with all_to_all and says why."""
    for name, cls, in_background in (
        ("auto", Shared, False),
        ("shared", Shared, False),
        ("all_to_all", AllToAll, True),
    ):
        choice = chosen(name, group.WORLD)
        assert type(choice.backend) is cls and choice.backend.in_background == in_background
    assert str(chosen("auto", group.WORLD)).startswith("dispatch and combine: shared (CPU ranks of one machine;")
    for name in ("auto", "all_to_all"):
        assert isinstance(chosen(name, None).backend, Local)
    for name, ranks, message in (
        ("deepep", group.WORLD, "--ep-backend deepep cannot be used: it needs GPUs"),
        ("shared", None, "--ep-backend shared needs --ep 2 or more"),
        ("nccl", group.WORLD, r"--ep-backend must be one of auto, all_to_all, .*: got 'nccl'"),
    ):
        with pytest.raises(ValueError, match=message):
            chosen(name, ranks)
    model = replace(preset("tiny"), num_layers=2)
    for name, overlapped in (("all_to_all", True), ("shared", False)):  # only if transfers run in the background
        pipeline = Pipeline(model, build("dualpipev", 1, 2), (1, 8), Parallel(2, name))
        assert pipeline.executor.overlap == overlapped
    patch = pytest.MonkeyPatch()
    patch.setattr(backend, "decide", lambda _name, _facts: ("symmetric", "because"))
    for make, fault in ((AllToAll, None), *FAULTS.items()):
        patch.setitem(backend._BACKENDS, "symmetric", lambda *a, make=make, **_options: make(*a))
        built = try_backend(
            partial(make, EXPERTS, group.WORLD), AllToAll(EXPERTS, group.WORLD), group.WORLD, DEVICE, **SIZES
        )
        choice = chosen("auto", group.WORLD)
        if fault is None:
            assert isinstance(built[0], AllToAll) and (choice.name, choice.reason) == ("symmetric", "because")
            continue
        assert built == (None, fault)
        assert (choice.name, choice.reason) == ("all_to_all", f"symmetric failed its trial: {fault}")
        with pytest.raises(ValueError) as error:
            chosen("symmetric", group.WORLD)
        assert str(error.value) == f"--ep-backend symmetric cannot be used: {fault}; use auto or all_to_all"

    patch.setattr(backend, "decide", lambda _name, _facts: ("copy_engine", "because"))
    patch.setitem(backend._BACKENDS, "copy_engine", overtaken)
    choice = chosen("copy_engine", group.WORLD)
    assert isinstance(choice.backend, Overtaken) and choice.backend.flags == "kernel"
    assert choice.reason == f"because, with flags of a kernel: with copied ones, {LATE}"
    patch.setitem(backend._BACKENDS, "copy_engine", lambda *a, **_options: Fails(*a))
    with pytest.raises(ValueError, match=r"^--ep-backend copy_engine cannot be used: DistError: no answer from rank 0"):
        chosen("copy_engine", group.WORLD)


def test_the_chosen_backend_is_tried_on_all_ranks():
    run_ranks(2, choices)


@pytest.mark.parametrize("build_backend", [
    AllToAll, Shared, lambda experts, group: Loopback(experts, group.size()),
    partial(Symmetric, top_k=1, max_tokens=1, hidden_size=8), partial(DeepEP, max_tokens=1, hidden_size=8),
], ids=["all_to_all", "shared", "modeled", "symmetric", "deepep"])  # fmt: skip
def test_experts_that_cannot_be_divided_evenly_are_refused(build_backend):
    with pytest.raises(ValueError, match="8 experts cannot be divided evenly over 3 ranks"):
        build_backend(8, SimpleNamespace(size=lambda: 3, rank=lambda: 0))
