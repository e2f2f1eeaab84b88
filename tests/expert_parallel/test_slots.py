"""Copies of experts: every choice goes to a copy of its expert, and the copies get equal shares."""

import pytest
import torch
from torch.distributed import group

from moe_dualpipe.expert_parallel import AllToAll, ByChoice, Shared
from moe_dualpipe.expert_parallel.slots import find_slots
from moe_dualpipe.models import MoE, StageOptions
from moe_dualpipe.models.experts import ExpertLayer
from tests.support.models import with_choices
from tests.support.ranks import run_ranks

PLACED = (0, 1, 2, 0, 3, 1, 0, 4)  # 5 experts in 8 slots; 0 has three copies, 1 has two


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_copies_get_equal_shares_and_a_rank_uses_its_own(ranks):
    per_rank, counts = len(PLACED) // ranks, torch.zeros(len(PLACED), dtype=torch.int64)
    ids = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(i))[:3] for i in range(240)])
    for rank in range(ranks):
        own = range(rank * per_rank, (rank + 1) * per_rank)
        slots = find_slots(PLACED, own)
        assert slots is not None
        found = slots.of(ids)
        assert torch.equal(torch.tensor(PLACED)[found], ids)
        for expert in {PLACED[slot] for slot in own} - ({0} if ranks == 2 else {0, 1} if ranks == 1 else {9}):
            assert {*found[ids == expert].tolist()} <= {*own}  # unless a rank has two copies of it
        counts += torch.bincount(found.flatten(), minlength=len(PLACED))
    for expert in range(5):
        of_copies = [int(counts[slot]) for slot, placed in enumerate(PLACED) if placed == expert]
        assert sum(of_copies) == ranks * int((ids == expert).sum())
        assert max(of_copies) <= 1.25 * min(of_copies)


def test_no_expert_stays_no_expert():
    slots = find_slots(PLACED, range(6, 8))
    assert slots is not None and slots.offset == 3
    ids = torch.tensor([[0, -1, 1], [2, 1, -1], [3, 4, 0]])
    assert slots.of(ids).tolist() == [[6, -1, 5], [2, 1, -1], [4, 7, 6]]
    assert find_slots((0, 1, 2), range(3)) is None
    moved = find_slots((2, 0, 1), range(1))
    assert moved is not None and moved.of(torch.tensor([[-1, 2, 0, 1]])).tolist() == [[-1, 0, 1, 2]]


def test_ranks_with_one_token_each_do_not_all_use_the_first_copy():
    used = set()
    for rank in range(4):
        slots = find_slots((0, 0, 0, 0, 1, 1, 1, 1), range(rank * 2, rank * 2 + 2))
        assert slots is not None
        used.add(int(slots.of(torch.tensor([[0]]))))
    assert len(used) == 4


class Scales(ExpertLayer):
    """Experts whose rows do not depend on each other in any bit, which a product may."""

    def __init__(self, config, num_local_experts):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.empty(num_local_experts, config.hidden_size))

    def reset_expert(self, e):
        torch.nn.init.normal_(self.scale[e])

    def forward(self, x_MD, expert_offsets):
        return x_MD * self.scale.repeat_interleave(expert_offsets.diff().long(), 0)


def copies_change_nothing(rank, backend):
    config = with_choices(num_experts=5, experts_per_token=3, num_shared_experts=0, experts=f"{__name__}:Scales")
    x = torch.randn(50, config.hidden_size, generator=torch.Generator().manual_seed(rank))
    scales = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(9))
    weight = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(8))
    outputs = []
    for placed in (PLACED, (0, 1, 2, 3, 4, 0, 0, 0), (4, 3, 2, 1, 0, 0, 0, 3)):
        layer = MoE(config, ByChoice(backend(len(placed), group.WORLD)), 0, StageOptions(seed=1))
        layer.place(placed)
        mine = [placed[slot] for slot in layer.expert_parallel.local_experts]
        with torch.no_grad():
            layer.experts.get_parameter("scale").copy_(scales[mine])
            layer.router.logits.weight.copy_(weight)
            outputs.append(layer(x))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    weights, ids = layer.router(x)
    expected = torch.zeros_like(x)
    for k in range(3):
        expected = expected + weights[:, k : k + 1] * (x * scales[ids[:, k]])
    torch.testing.assert_close(outputs[0], expected.detach())


@pytest.mark.parametrize("backend,ranks", [(AllToAll, 2), (Shared, 4)])
def test_copies_change_no_bit(backend, ranks):
    run_ranks(ranks, copies_change_nothing, backend)
