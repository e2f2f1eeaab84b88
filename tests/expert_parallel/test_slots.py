"""Experts in any slots, some in several: a layer with sums in the order of choices gives the same bits each time."""

from typing import Any

import pytest
import torch
from torch.distributed import group

from moe_dualpipe.expert_parallel import AllToAll, ByChoice, Local
from moe_dualpipe.expert_parallel.slots import find_slots
from moe_dualpipe.models import ExpertLayer, MoE, StageOptions
from tests.support.models import with_choices
from tests.support.ranks import run_ranks

EXPERTS, SLOTS, TOKENS, K = 5, 8, 6, 3
PLACED = (0, 1, 2, 0, 3, 1, 0, 4)  # 0 has three copies, 1 has two
PLACES = [PLACED, (0, 1, 2, 3, 4, 0, 0, 0), (4, 3, 2, 1, 0, 0, 0, 3)]


class Scales(ExpertLayer):
    """Experts whose rows do not depend on each other in any bit, which a product may."""

    def __init__(self, config, num_local_experts):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.empty(num_local_experts, config.hidden_size))

    def reset_expert(self, e):
        torch.nn.init.normal_(self.scale[e])

    def forward(self, x_MD, expert_offsets):
        return x_MD * self.scale.repeat_interleave(expert_offsets.diff().long(), 0)


def results(layer: Any, rank, num_experts, mine):
    """Output, gradients of x and router, and those of all experts, added over copies and ranks."""
    weight, scale = layer.router.logits.weight, layer.experts.scale
    x = torch.randn(TOKENS, weight.shape[1], generator=torch.Generator().manual_seed(rank)).to(weight.dtype)
    layer.zero_grad()
    y = layer(x.requires_grad_())
    y.backward(y.detach().flip(0))
    of_experts = torch.zeros(num_experts, scale.shape[1]).index_add(0, torch.tensor(mine), scale.grad.float())
    return [y.detach(), x.grad, weight.grad, of_experts]


def places_agree(rank, num_experts, places):
    config = with_choices(
        hidden_size=16, num_experts=num_experts, experts_per_token=K, num_shared_experts=0,
        experts=f"{__name__}:Scales",
    )  # fmt: skip
    torch.manual_seed(0)  # for the routers
    whole = MoE(config, Local(num_experts), 0, StageOptions(seed=1))
    layer, seen = MoE(config, ByChoice(AllToAll(SLOTS, group.WORLD)), 0, StageOptions(seed=1)), []
    layer.router.load_state_dict(whole.router.state_dict())
    for placed in places:
        layer.place(placed)
        mine = [placed[slot] for slot in layer.expert_parallel.local_experts]
        with torch.no_grad():
            layer.experts.get_parameter("scale").copy_(whole.experts.get_parameter("scale")[mine])
        seen.append(results(layer, rank, num_experts, mine))
    for found in seen:
        torch.distributed.all_reduce(found[3])
    expected = results(whole, rank, num_experts, range(num_experts))
    torch.distributed.all_reduce(expected[3])
    for found in seen:
        exact = 3 if num_experts < SLOTS else 4  # copies have parts of a gradient
        assert all(map(torch.equal, found[:exact], seen[0][:exact]))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


@pytest.mark.parametrize("num_experts,places", [
    (EXPERTS, PLACES), (SLOTS, [[*range(8)], [3, 1, 4, 0, 5, 7, 2, 6], [7, 6, 5, 4, 3, 2, 1, 0]]),
], ids=["copies", "permutations"])  # fmt: skip
def test_places_of_experts_and_copies_change_no_bit(num_experts, places):
    run_ranks(2, places_agree, num_experts, places)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_copies_get_equal_shares_and_a_rank_uses_its_own(ranks):
    per_rank, counts = len(PLACED) // ranks, torch.zeros(len(PLACED), dtype=torch.int64)
    ids = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(i))[:3] for i in range(240)])
    for rank in range(ranks):
        own = range(rank * per_rank, (rank + 1) * per_rank)
        found = find_slots(PLACED, own).of(ids)
        assert torch.equal(torch.tensor(PLACED)[found], ids)
        for expert in {PLACED[slot] for slot in own} - ({0} if ranks == 2 else {0, 1} if ranks == 1 else {9}):
            assert {*found[ids == expert].tolist()} <= {*own}  # unless a rank has two copies of it
        counts += torch.bincount(found.flatten(), minlength=len(PLACED))
    for expert in range(5):
        of_copies = counts[torch.tensor(PLACED) == expert]
        assert of_copies.sum() == ranks * (ids == expert).sum() and of_copies.max() <= 1.25 * of_copies.min()


def test_examples():
    slots = find_slots(PLACED, range(6, 8))
    ids = torch.tensor([[0, -1, 1], [2, 1, -1], [3, 4, 0]])
    assert slots.offset == 3 and slots.of(ids).tolist() == [[6, -1, 5], [2, 1, -1], [4, 7, 6]]
    assert find_slots((0, 1, 2), range(3)) is None
    assert find_slots((2, 0, 1), range(1)).of(torch.tensor([[-1, 2, 0, 1]])).tolist() == [[-1, 0, 1, 2]]
    halves = (0, 0, 0, 0, 1, 1, 1, 1)  # ranks with one token each do not all use the first copy
    assert len({int(find_slots(halves, range(r, r + 2)).of(torch.tensor([[0]]))) for r in (0, 2, 4, 6)}) == 4


def test_choices_are_added_in_their_order_also_those_of_no_expert():
    ep = ByChoice(Local(3))
    route = ep.prepare(torch.tensor([[2, 0, 1], [0, 1, 2]]))
    rows = torch.tensor([1e8, -1e8, 1, 1, 1e8, -1e8])[:, None]  # 1 + 1e8 is 1e8 in fp32
    assert ep.combine(rows, route).wait().y_TD.flatten().tolist() == [1, 0]
    route = ep.prepare(torch.tensor([[0, 2, -1], [-1, -1, -1], [1, 2, 1]]))
    combined = ep.combine(torch.ones(9, 4), route, torch.arange(9.0)[:, None]).wait()
    assert combined.y_TD.tolist() == [[3.0] * 4] * 3
    assert combined.weight_grads_TK.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
