"""Sums in the order of choices: any placement of experts gives the same bits, as a rank with all experts does."""

import pytest
import torch
from torch.distributed import group

from moe_dualpipe.expert_parallel import AllToAll, ByChoice, Local, Shared
from moe_dualpipe.expert_parallel.deepep import DeepEP
from moe_dualpipe.models import MoE, StageOptions
from tests.machines.deepep import Buffer, ElasticBuffer, installed
from tests.support.models import with_choices
from tests.support.ranks import run_ranks
from tests.support.symmetric_ranks import build as build_symmetric
from tests.support.symmetric_ranks import prepare

EXPERTS, WIDTH, TOKENS, K = 8, 16, 6, 3
PLACES = ([*range(8)], [3, 1, 4, 0, 5, 7, 2, 6], [7, 6, 5, 4, 3, 2, 1, 0])


def placed(layer, whole, places):
    """Put the weights of `whole`, a layer with all experts, into the slots of this rank."""
    layer.place(places)
    mine = [places[slot] for slot in layer.expert_parallel.local_experts]
    with torch.no_grad():
        for name, parameter in layer.experts.named_parameters():
            parameter.copy_(whole.experts.get_parameter(name)[mine])
    return mine


def results(layer, rank):
    """Output and gradients of x and router."""
    weight = layer.router.logits.weight
    x = torch.randn(TOKENS, weight.shape[1], generator=torch.Generator().manual_seed(rank)).to(weight.dtype)
    x.requires_grad_()
    for parameter in layer.parameters():
        parameter.grad = None
    y = layer(x)
    y.backward(y.detach().flip(0))
    return [y.detach(), x.grad, weight.grad]


def build_backend(kind):
    """The backend, and the width and dtype of the tokens."""
    if kind == "symmetric":
        prepare(pytest.MonkeyPatch())
        return build_symmetric(max_tokens=TOKENS * K, hidden_size=WIDTH, top_k=1), WIDTH, torch.float32
    if kind in ("buffer", "elastic"):  # stand-ins for both interfaces of DeepEP
        sizes = {"max_tokens": TOKENS * K, "hidden_size": 256, "top_k": 1, "api": kind}
        return DeepEP(EXPERTS, group.WORLD, **sizes), 256, torch.bfloat16
    return {"shared": Shared, "all_to_all": AllToAll}[kind](EXPERTS, group.WORLD), WIDTH, torch.float32


def places_agree(rank, kind):
    with installed(Buffer, ElasticBuffer):
        backend, width, dtype = build_backend(kind)
        check_places(rank, backend, width, dtype)


def check_places(rank, backend, width, dtype):
    config = with_choices(hidden_size=width, num_experts=EXPERTS, experts_per_token=K, num_shared_experts=0)
    torch.manual_seed(0)  # for the routers
    whole = MoE(config, Local(EXPERTS), 0, StageOptions(seed=1)).to(dtype)
    layer = MoE(config, ByChoice(backend), 0, StageOptions(seed=1)).to(dtype)
    layer.router.load_state_dict(whole.router.state_dict())
    seen, grads = [], []
    for places in PLACES:
        mine = placed(layer, whole, places)
        seen.append(results(layer, rank))
        of_experts = [{}, {}]
        own = {
            (name, expert): p.grad[i].tolist()
            for name, p in layer.experts.named_parameters()
            for i, expert in enumerate(mine)
        }
        torch.distributed.all_gather_object(of_experts, own)
        grads.append(of_experts[0] | of_experts[1])
    for other in seen[1:]:
        for a, b in zip(seen[0], other, strict=True):
            assert torch.equal(a, b)
    assert grads[0] == grads[1] == grads[2]
    for a, b in zip(seen[0], results(whole, rank), strict=True):
        tolerance = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


@pytest.mark.parametrize(
    "kind",
    [
        "shared",
        "all_to_all",
        "elastic",
        *(pytest.param(kind, marks=pytest.mark.long) for kind in ("buffer", "symmetric")),
    ],
)
def test_places_of_experts_change_no_bit(kind):
    run_ranks(2, places_agree, kind)


def test_choices_of_no_expert_and_places():
    torch.manual_seed(0)
    config = with_choices(hidden_size=WIDTH, num_experts=EXPERTS, experts_per_token=K)
    layer = MoE(config, Local(EXPERTS), 0, StageOptions(seed=1))
    ids = torch.tensor([[0, 5, -1], [-1, -1, -1], [7, 2, 1]])
    layer.place(PLACES[1])
    assert layer.slots is not None
    assert layer.slots.of(ids).tolist() == [[3, 4, -1], [-1, -1, -1], [5, 6, 1]]
    route = ByChoice(Local(EXPERTS)).prepare(ids)
    combined = ByChoice(Local(EXPERTS)).combine(torch.ones(9, WIDTH), route, torch.arange(9.0)[:, None]).wait()
    assert combined.y_TD.tolist() == [[3.0] * WIDTH] * 3 and combined.weight_grads_TK is not None
    assert combined.weight_grads_TK.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    layer.place(range(EXPERTS))
    assert layer.slots is None


def test_choices_are_added_in_their_order():
    route = ByChoice(Local(3)).prepare(torch.tensor([[2, 0, 1], [0, 1, 2]]))
    rows = torch.tensor([1e8, -1e8, 1, 1, 1e8, -1e8])[:, None]  # 1 + 1e8 is 1e8 in fp32
    assert ByChoice(Local(3)).combine(rows, route).wait().y_TD.flatten().tolist() == [1, 0]
