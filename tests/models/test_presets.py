"""Presets of published models have the published sizes."""

import pytest
import torch

from moe_dualpipe.models import PRESETS, build_model, preset

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
