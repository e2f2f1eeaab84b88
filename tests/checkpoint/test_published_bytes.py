"""Each rank reads only the tensors that it holds, counted in bytes."""

import torch

from moe_dualpipe.checkpoint.huggingface import PublishedModel
from tests.support.published import random_model, save
from tests.support.published_runs import LAYOUTS, bytes_read_under_each
from tests.support.ranks import run_ranks


def test_each_rank_reads_its_tensors_once(tmp_path):
    theirs = random_model("qwen2_moe", dtype=torch.bfloat16, num_experts=6, num_hidden_layers=4)
    folders = {
        "single": save(theirs, tmp_path / "single"),
        "shards": save(theirs, tmp_path / "shards", max_shard_size="10KB"),
    }
    assert len([*folders["shards"].glob("*.safetensors")]) > 3
    shapes = PublishedModel(folders["single"]).shapes
    sizes = {name: 2 * torch.Size(shape).numel() for name, shape in shapes.items()}
    ranks = run_ranks(2, bytes_read_under_each, folders)
    for layout in LAYOUTS:
        for folder in folders:
            found = [rank[layout, folder] for rank in ranks]
            assert {name for _, names in found for name in names} == {*sizes}
            for count, names in found:
                assert count == sum(sizes[name] for name in names), (layout, folder)
