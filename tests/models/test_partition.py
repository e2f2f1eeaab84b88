"""The split of layers over stages, and the FLOPs of layers."""

from random import Random

import pytest

from moe_dualpipe.models import build_model, split
from moe_dualpipe.models.costs import flops_shape
from moe_dualpipe.models.partition import divide
from tests.support.models import CONFIG, with_choices


def test_split_covers_all_layers_and_describes_stages():
    for num_stages in range(1, 5):
        specs = split(CONFIG, num_stages)
        assert [layer for spec in specs for layer in spec.layers] == list(range(4))
        assert [spec.embedding for spec in specs] == [True] + [False] * (num_stages - 1)
        assert [spec.head for spec in specs] == [False] * (num_stages - 1) + [True]
        assert sum(spec.share for spec in specs) == pytest.approx(1)
    assert str(split(CONFIG, 1)[0]) == "embedding + layers 0-3 + head (100% of the work)"
    assert [len(spec.layers) for spec in split(with_choices(num_layers=10_000), 4)] == [2500] * 4
    with pytest.raises(ValueError, match="4 layers cannot be divided over 5 pipeline stages: use at least 5 layers"):
        split(CONFIG, 5)


def by_all_pairs(costs, num_parts):
    """The division of `costs` by the plain recurrence: of equally good ones, the one whose first parts end earliest."""
    best = {(0, 0): (0, ())}
    for parts in range(1, num_parts + 1):
        for end in range(parts, len(costs) + 1):
            best[parts, end] = min(
                (max(best[parts - 1, start][0], sum(costs[start:end])), (*best[parts - 1, start][1], end))
                for start in range(parts - 1, end)
                if (parts - 1, start) in best
            )
    return best[num_parts, len(costs)][1]


@pytest.mark.parametrize("largest", [2, 9, 1000])
def test_a_division_is_that_of_the_plain_recurrence(largest):
    random = Random(largest)
    for _ in range(60):
        costs = [random.randint(1, largest) for _ in range(random.randint(1, 12))]
        costs[-1] += random.choice([0, 3 * largest])  # the head
        for parts in range(1, len(costs) + 1):
            assert divide(costs, parts) == by_all_pairs(costs, parts), (costs, parts)


@pytest.mark.parametrize("choices", [{}, {"attention": "mla"}, {"attention": "mla", "q_rank": 7}])
def test_layer_flops_are_two_per_weight_that_a_token_uses(choices):
    config = with_choices(**choices)
    for name, block in build_model(config).layers.items():
        active = sum(
            p.numel() * (CONFIG.experts_per_token / CONFIG.num_experts if ".experts." in key else 1)
            for key, p in block.named_parameters()
            if p.ndim > 1
        )
        assert flops_shape(config).layers[int(name)].flops(config.hidden_size) == 2 * active
