"""DeepEP equals AllToAll bit by bit, with a stand-in for its interface that checks each call, and refuses misuse."""

import contextlib
import gc
import inspect
import json
import types
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import group

from moe_dualpipe.expert_parallel import AllToAll
from moe_dualpipe.expert_parallel.deepep import DeepEP
from moe_dualpipe.expert_parallel.deepep.library import GpuMachine, inspect_machine, load_library
from tests.machines import deepep
from tests.machines.deepep import installed
from tests.support.exchanges import check_round
from tests.support.expert_ids import random_ids
from tests.support.ranks import run_ranks

EXPERTS, WIDTH, TOP_K = 8, 256, 3
SIGNATURES = json.loads((Path(deepep.__file__).with_name("deepep_signatures.json")).read_text())


def build(ranks=None, **options) -> Any:
    sizes: Any = {"max_tokens": 30, "hidden_size": WIDTH}
    return DeepEP(EXPERTS, ranks or group.WORLD, **(sizes | options))


def one_of(ranks) -> Any:
    """The first rank of a group, without the others."""
    return types.SimpleNamespace(size=lambda: ranks, rank=lambda: 0)


# ---- equal to AllToAll ----


def inputs(rank):
    """Tokens, weights and ids of one rank. Rank 1 has no tokens, and no token has an expert on rank 3."""
    generator = torch.Generator().manual_seed(10 * rank + 3)
    tokens = (7, 0, 30, 1)[rank]
    x = torch.randn(tokens, WIDTH, generator=generator).bfloat16()
    weights = torch.rand(tokens, TOP_K, generator=generator)
    ids = random_ids(generator, tokens, TOP_K, "some without experts", 6)
    ids[:1] = -1  # a token without any expert
    return x, weights, ids


def all_transfers(ep: Any, rank):
    """A second dispatch with weights and a combine with gradients, started before the first dispatch is waited for."""
    x, weights, ids = inputs(rank)
    route: Any = ep.prepare(ids)
    first, again = ep.dispatch(x, route), ep.dispatch(-x, route, weights.double())
    assert route.local_ids_NK is None
    x_ND, weights_NK = again.wait()
    assert again.wait().x_ND is x_ND and first.wait().weights_NK is None
    assert route.local_ids_NK is not None
    local = route.local_ids_NK >= 0
    grads = torch.where(local, torch.arange(TOP_K) + 1.5, 0).double()
    back = ep.combine(x_ND.T.contiguous().T, route, grads).wait()
    assert ep.combine(x_ND, route).wait().weight_grads_TK is None
    return [first.wait().x_ND, x_ND, weights_NK * local, back.y_TD, back.weight_grads_TK]


def equals_all_to_all(rank):
    x, weights, ids = inputs(rank)
    reference = AllToAll(EXPERTS, group.WORLD)
    grads = torch.randn(x.shape[::-1], generator=torch.Generator().manual_seed(rank)).bfloat16().T
    with installed():
        ep = build()
        assert ep.local_experts == reference.local_experts
        route, _ = check_round(ep, reference, ids.T.contiguous().T, x, weights, grads)
        assert route.exact
        for ours, expected in zip(all_transfers(ep, rank), all_transfers(reference, rank), strict=True):
            assert ours.dtype == expected.dtype and torch.equal(ours, expected)
        check_waits_and_lifetimes(ep)


def test_deepep_equals_all_to_all_with_empty_ranks_and_choices_of_no_expert():
    run_ranks(4, equals_all_to_all)


def check_waits_and_lifetimes(ep):
    """The inputs of a transfer live until it is waited for."""
    ids = torch.tensor([[0, 7, -1], [3, 4, 1]])
    route = ep.prepare(ids)
    ids.zero_()  # a route does not refer to the ids that it was made of
    x = torch.ones(2, WIDTH).bfloat16()
    reference, first = weakref.ref(x), ep.dispatch(x, route, torch.ones(2, TOP_K))
    del x
    gc.collect()
    event = weakref.ref(route.backend_state.arriving)
    assert reference() is not None
    x_ND, _ = first.wait()
    assert reference() is None and event() is None and x_ND.float().sum() == len(x_ND) * WIDTH
    y = ep.combine(x_ND, route).wait().y_TD
    assert y[:, 0].tolist() == [2, 3]  # sums over ranks


# ---- options ----


def test_options_reach_deepep():
    with installed():
        made, default = build(one_of(2), num_sms=24, max_tokens=77, top_k=5), build(one_of(2))
    buffer = made.buffer
    assert (made.num_sms, buffer.num_max_tokens_per_rank, buffer.num_topk) == (24, 77, 5)
    assert (default.num_sms, default.buffer.hidden, default.buffer.deterministic) == (0, WIDTH, True)


@pytest.mark.parametrize("name", SIGNATURES["signatures"])
def test_the_stand_in_has_the_recorded_signatures(name):
    class_name, method = name.split(".")
    parameters = inspect.signature(getattr(getattr(deepep, class_name), method)).parameters.values()
    ours = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters if p.name != "self"]
    assert ours == SIGNATURES["signatures"][name]


# ---- refusals ----

REFUSED = {
    "odd num_sms": ({"num_sms": 3}, "num_sms must be even and at least 2, or None: got 3"),
    "no num_sms": ({"num_sms": 0}, "num_sms must be even and at least 2, or None: got 0"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens must be at least 1: got 0"),
    "width": ({"hidden_size": 384}, "hidden size divisible by 256: got 384; or choose --ep-backend all_to_all"),
    "DeepEP 1": ({"old": True}, "deep_ep 1.2.1 has no ElasticBuffer: install DeepEP 2, or choose --ep-backend"),
    "old GPU": ({"capability": (8, 6)}, r"capability 9.0: got 8.6"),
    # torch.empty would run kernels on the stream of the transfers; DeepEP asserts that it does not.
    "filled memory": ({"filled": True}, "fill_uninitialized_memory = True: set the latter to False"),
}


TENSORS = {
    "device": ({"ids": torch.zeros(3, 2, dtype=torch.int64, device="meta")}, "on cpu: got meta; or choose"),
    "tokens": ({"ids": torch.zeros(31, 2).long()}, "memory is for 30 tokens of a rank: got 31; increase max_tokens"),
    "choices": ({"ids": torch.full((3, 33), -1)}, "at most 32 choices per token: got 33"),
    "dtype": ({"x": torch.ones(30, WIDTH)}, "rows in bfloat16: got torch.float32; use --dtype bfloat16, or choose"),
    "row": ({"x": torch.ones(30, 512).bfloat16()}, "rows of 256 elements: got 512"),
    "combine": ({"y": torch.ones(0, WIDTH).bfloat16()}, "first transfer of a route must be a dispatch: got combine"),
}  # fmt: skip


@pytest.mark.parametrize("changes,message", [*REFUSED.values(), *TENSORS.values()], ids=[*REFUSED, *TENSORS])
def test_options_and_tensors_that_deepep_does_not_support_raise(changes, message):
    given = {"old": False, "capability": (9, 0), "filled": False} | changes
    options = {name: changes[name] for name in changes.keys() - {"old", "capability", "filled", "x", "y", "ids"}}
    with (
        installed(given["old"], given["capability"]),
        mock.patch("torch.are_deterministic_algorithms_enabled", return_value=given["filled"]),
        pytest.raises((ValueError, RuntimeError), match=message) as error,
    ):
        ep = build(one_of(2), **options)
        route = ep.prepare(given.get("ids", torch.zeros(30, 2).long()))
        ep.combine(given["y"], route) if "y" in given else ep.dispatch(given["x"], route)
    assert "\n" not in str(error.value)


def test_what_this_machine_lacks_is_said_in_one_line_with_the_way_out():
    way_out = r"install DeepEP \(https://\S+\), or choose --ep-backend all_to_all$"
    for message, failure in {
        "deep_ep is not installed:": ModuleNotFoundError("No module", name="deep_ep"),
        "imported (wrong NCCL)": AssertionError("wrong NCCL"), "imported (no libcuda)": ImportError("no libcuda"),
        "the module deep_ep_cpp, which": ModuleNotFoundError("No module", name="deep_ep_cpp"),
    }.items():  # fmt: skip
        with mock.patch("importlib.import_module", side_effect=failure), pytest.raises(ValueError, match=way_out) as e:
            load_library()
        assert message in str(e.value) and "\n" not in str(e.value)
    for available, name, message in (
        (False, "nccl", "CUDA, which is not available: run on GPUs, or choose --ep-backend"),
        (True, "gloo", "needs a process group of NCCL: got gloo; or choose --ep-backend"),
        (True, "cpu:gloo,cuda:nccl", None),
    ):
        with (
            mock.patch("torch.cuda.is_available", return_value=available),
            mock.patch("torch.distributed.get_backend", return_value=name),
            mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
            pytest.raises(ValueError, match=message) if message else contextlib.nullcontext(),
        ):
            assert inspect_machine(one_of(2)) == GpuMachine("cuda", (9, 0))
