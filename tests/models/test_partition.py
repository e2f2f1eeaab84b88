"""The split of layers over stages, the FLOPs of layers, and the sizes of published models."""

from random import Random

import pytest
import torch

from moe_dualpipe.models import PRESETS, build_model, preset, split
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
    assert [len(spec.layers) for spec in split(with_choices(num_layers=2000), 4)] == [500] * 4
    with pytest.raises(ValueError, match="4 layers cannot be divided over 5 pipeline stages: use at least 5 layers"):
        split(CONFIG, 5)


def test_a_list_of_layers_is_followed_or_refused():
    specs = split(CONFIG, 3, (1, 1, 2))
    assert [[*spec.layers] for spec in specs] == [[0], [1], [2, 3]] and specs[2].head and specs[0].embedding
    assert sum(spec.share for spec in specs) == pytest.approx(1)
    for layers, problem in [
        ((2, 2), "parallel.layers 2,2 is for 2 stages, and the schedule has 3"),
        ((1, 1, 1), "parallel.layers 1,1,1 must be at least 1 each and sum to 4, the layers of the model: got 3"),
        ((0, 2, 2), "parallel.layers 0,2,2 must be at least 1 each"),
    ]:
        with pytest.raises(ValueError, match=f"^{problem}"):
            split(CONFIG, 3, layers)


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


@pytest.mark.parametrize("choices", [
    {}, {"attention": "mla"}, {"attention": "mla", "q_rank": 7}, {"experts": "tests.support.own_layers:Expert"},
], ids=str)  # fmt: skip
def test_layer_flops_are_two_per_weight_that_a_token_uses(choices):
    config = with_choices(**choices)
    for name, block in build_model(config).layers.items():
        active = sum(
            p.numel() * (CONFIG.experts_per_token / CONFIG.num_experts if ".experts." in key else 1)
            for key, p in block.named_parameters()
            if p.ndim > 1
        )
        assert flops_shape(config).layers[int(name)].flops(config.hidden_size) == 2 * active


# All parameters, and the active ones: those that one token uses, including K of E experts and the embedding. Only some
# of the published numbers include the embedding.
TABLE = [
    # name, all, active, the embedding's, published all, published active, whether that includes the embedding
    ("small", 467_823_360, 104_491_776, 196_608, 468e6, 104e6, True),
    ("olmoe-1b-7b", 6_919_161_856, 1_282_017_280, 103_022_592, 6.92e9, 1.28e9, True),
    ("qwen3-30b-a3b", 30_532_122_624, 3_353_032_704, 311_164_928, 30.5e9, 3.3e9, True),
    ("mixtral-8x7b", 46_702_792_704, 12_879_925_248, 131_072_000, 46.7e9, 12.9e9, True),
    ("deepseek-v2-lite", 15_706_484_224, 2_661_150_208, 209_715_200, 15.7e9, 2.4e9, False),
    ("deepseek-v3", 671_026_404_352, 37_552_282_624, 926_679_040, 671e9, 37e9, False),
]


@pytest.mark.parametrize("row", TABLE, ids=[row[0] for row in TABLE])
def test_parameter_counts(row, monkeypatch):
    name, total, active, embedding, all_published, active_published, with_embedding = row
    monkeypatch.setattr(torch, "manual_seed", None)  # 15,000 experts on the meta device must not be seeded
    config = preset(name)
    with torch.device("meta"):
        model = build_model(config)
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    sizes = {key: p.numel() for key, p in model.named_parameters()}
    experts = sum(size for key, size in sizes.items() if ".experts." in key)
    assert sum(sizes.values()) == total == pytest.approx(all_published, rel=0.002)
    assert sizes["embedding.weight"] == embedding
    assert total - experts + experts * config.experts_per_token // config.num_experts == active
    used = active if with_embedding else active - embedding
    assert used == pytest.approx(active_published, rel=0.025)  # published numbers have two or three digits


def test_all_but_tiny_are_in_the_table():
    assert {"tiny", *(row[0] for row in TABLE)} == set(PRESETS)
