"""DeepEP equals AllToAll bit by bit, with stand-ins for both interfaces that check each call, and refuses misuse."""

import contextlib
import gc
import inspect
import json
import operator
import types
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import group

from moe_dualpipe.expert_parallel import AllToAll, combine, dispatch
from moe_dualpipe.expert_parallel.deepep import DeepEP
from moe_dualpipe.expert_parallel.deepep.library import Machine, inspect_machine, load_library
from moe_dualpipe.kernels.permute import permute, unpermute
from tests.machines import deepep
from tests.machines.deepep import Buffer, ElasticBuffer, installed
from tests.support.ranks import run_ranks

APIS = ("buffer", "elastic")
EXPERTS, WIDTH, TOP_K = 8, 256, 3
SIGNATURES = json.loads((Path(deepep.__file__).parent / "signatures.json").read_text())


def build(api, ranks=None, **options) -> Any:
    sizes: Any = {"max_tokens": 30, "hidden_size": WIDTH, "api": api}
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
    ids = [torch.randperm(6, generator=generator)[:TOP_K] for _ in range(tokens)]
    ids = torch.stack(ids) if ids else torch.empty(0, TOP_K, dtype=torch.int64)
    ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.3, -1, ids)
    ids[:1] = -1  # a token without any expert
    return x, weights, ids


def through_autograd(ep, rank):
    """Output, gradients and the received tensors of a layer whose expert e scales tokens by 1, 1/2, 1/4, ..."""
    x, weights, ids = inputs(rank)
    for tensor in (x, weights):
        tensor.requires_grad_()
    route = ep.prepare(ids.T.contiguous().T)
    x_ND, weights_NK = dispatch(x, weights, route, ep)
    received = x_ND.detach().clone(), route.local_ids_NK.int(), weights_NK.detach() * (route.local_ids_NK >= 0)
    order = route.order
    experts = torch.arange(len(ep.local_experts)).repeat_interleave(order.expert_offsets.diff())
    rows_MD = permute(x_ND, order) * 0.5 ** (ep.local_experts.start + experts)[:, None].bfloat16()
    y = combine(unpermute(rows_MD, order, weights_NK), route, ep)
    y.backward(torch.randn(y.shape[::-1], generator=torch.Generator().manual_seed(rank)).bfloat16().T)
    return [y.detach(), x.grad, weights.grad, *received, torch.tensor([route.num_rows, route.num_choices])], route


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
    reference = AllToAll(EXPERTS, group.WORLD)
    expected, _ = through_autograd(reference, rank)
    expected_transfers = all_transfers(reference, rank)
    with installed(Buffer, ElasticBuffer):
        for api in APIS:
            ep = build(api)
            assert ep.local_experts == reference.local_experts
            ours, route = through_autograd(ep, rank)
            assert route.exact and ours[-1].tolist() == [len(ours[3]), int((ours[4] >= 0).sum())]
            for a, b in zip(ours + all_transfers(ep, rank), expected + expected_transfers, strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b), api
            check_waits_and_lifetimes(build(api, group.WORLD))


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


@pytest.mark.parametrize("options,expected", [
    ({"api": "elastic"}, {"num_sms": 0, "buffer.hidden": WIDTH, "buffer.deterministic": True}),
    ({"api": "elastic", "num_sms": 24, "max_tokens": 77, "top_k": 5},
     {"num_sms": 24, "buffer.num_max_tokens_per_rank": 77, "buffer.num_topk": 5}),
    ({"api": "buffer"}, {"dispatch_config.num_sms": 20}),
    ({"api": "buffer", "num_sms": 16}, {"dispatch_config.num_sms": 16, "combine_config.num_sms": 16}),
    # Of dispatch, which needs more than combine.
    ({"api": "buffer", "ranks": one_of(4)}, {"buffer.num_nvl_bytes": 20 * 4 * WIDTH * 2 * 6}),
])  # fmt: skip
def test_options_reach_deepep(options, expected):
    with installed(Buffer, ElasticBuffer):
        made = build(**{"ranks": one_of(2)} | options).transfers
    assert {name: operator.attrgetter(name)(made) for name in expected} == expected


def test_the_newest_usable_interface_is_chosen():
    both = (Buffer, ElasticBuffer)
    for classes, capability, chosen in (
        (both, (9, 0), ElasticBuffer), (both, (10, 0), ElasticBuffer), (both, (8, 0), Buffer),
        ((Buffer,), (9, 0), Buffer),
    ):  # fmt: skip
        with installed(*classes, capability=capability):
            assert type(build("auto", one_of(2)).transfers.buffer) is chosen


@pytest.mark.parametrize("name", SIGNATURES["signatures"])
def test_stand_ins_have_the_recorded_signatures(name):
    class_name, method = name.split(".")
    parameters = inspect.signature(getattr(getattr(deepep, class_name), method)).parameters.values()
    ours = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters if p.name != "self"]
    assert ours == SIGNATURES["signatures"][name]


# ---- refusals ----

ONLY_FIRST, ONLY_SECOND = {"classes": (Buffer,)}, {"classes": (ElasticBuffer,), "capability": (8, 6)}
REFUSED = {
    "odd num_sms": ({"num_sms": 3}, "num_sms must be even and at least 2, or None: got 3"),
    "no num_sms": ({"num_sms": 0}, "num_sms must be even and at least 2, or None: got 0"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens must be at least 1: got 0"),
    "api": ({"api": "fast"}, "api must be auto, elastic or buffer: got fast"),
    "width 2": ({"hidden_size": 384}, "hidden size divisible by 256: got 384; or choose --ep-backend all_to_all"),
    "width 1": ({"api": "buffer", "hidden_size": 24}, "hidden size divisible by 16 for 2 ranks: got 24"),
    "ranks": ({"api": "buffer", "ranks": one_of(1)}, "Buffer needs 2, 4, 8, .* ranks: got 1; or choose"),
    "no second": (ONLY_FIRST, "deep_ep 2.1.0 has no ElasticBuffer: install DeepEP"),
    "no first": (ONLY_SECOND | {"api": "auto"}, "has no Buffer: install"),
    "old GPU": (ONLY_SECOND, r"capability 9.0: got 8.6"),
    # torch.empty would run kernels on the stream of the transfers; DeepEP asserts that it does not.
    "filled memory": ({"api": "buffer", "filled": True}, "fill_uninitialized_memory = True: set the latter to False"),
}


TENSORS = {
    "device": ({"ids": torch.zeros(3, 2, dtype=torch.int64, device="meta")}, "on cpu: got meta; or choose"),
    "tokens": ({"ids": torch.zeros(31, 2).long()}, "memory is for 30 tokens of a rank: got 31; increase max_tokens"),
    "choices": ({"ids": torch.full((3, 33), -1)}, "at most 32 choices per token: got 33"),
    "dtype": ({"x": torch.ones(30, WIDTH)}, "rows in bfloat16: got torch.float32; use --dtype bfloat16, or choose"),
    "width": ({"x": torch.ones(30, 512).bfloat16()}, "rows of 256 elements: got 512"),
    "combine": ({"y": torch.ones(0, WIDTH).bfloat16()}, "first transfer of a route must be a dispatch: got combine"),
}  # fmt: skip


@pytest.mark.parametrize("changes,message", [*REFUSED.values(), *TENSORS.values()], ids=[*REFUSED, *TENSORS])
def test_options_and_tensors_that_deepep_does_not_support_raise(changes, message):
    given = {"classes": (Buffer, ElasticBuffer), "capability": (9, 0), "filled": False} | changes
    options = {name: changes[name] for name in changes.keys() - {"classes", "capability", "filled", "x", "y", "ids"}}
    with (
        installed(*given["classes"], capability=given["capability"]),
        mock.patch("torch.are_deterministic_algorithms_enabled", return_value=given["filled"]),
        pytest.raises((ValueError, RuntimeError), match=message) as error,
    ):
        ep = build(**{"api": "elastic", "ranks": one_of(2)} | options)
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
            assert inspect_machine(one_of(2)) == Machine("cuda", (9, 0))
