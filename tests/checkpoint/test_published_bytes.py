"""Each rank reads only the tensors that it holds, counted in bytes."""

import torch

from moe_dualpipe.checkpoint.huggingface import PublishedModel
from tests.support.published import random_model, save
from tests.support.published_runs import LAYOUTS, bytes_read_under_each
from tests.support.ranks import run_ranks


def is_expert(name):
    return ".experts." in name


def test_each_rank_reads_its_tensors_once(tmp_path):
    theirs = random_model("qwen2_moe", dtype=torch.bfloat16, num_experts=6, num_hidden_layers=4)
    folders = {
        "single": save(theirs, tmp_path / "single"),
        "shards": save(theirs, tmp_path / "shards", max_shard_size="10KB"),
    }
    assert len([*folders["shards"].glob("*.safetensors")]) > 3
    shapes = PublishedModel(folders["single"]).shapes
    sizes = {name: 2 * torch.Size(shape).numel() for name, shape in shapes.items()}
    experts = sum(size for name, size in sizes.items() if is_expert(name))

    ranks = run_ranks(2, bytes_read_under_each, folders)
    for layout in LAYOUTS:
        for folder in folders:
            (bytes_0, names_0), (bytes_1, names_1) = found = [rank[layout, folder] for rank in ranks]
            for count, names in found:
                assert count == sum(sizes[name] for name in names), (layout, folder)
            both = {*names_0} & {*names_1}
            if layout == "dualpipe":  # replicas read their own copies
                assert {*names_0} == {*names_1} == {*sizes}
            elif layout == "ep 2":  # experts are divided, all else is replicated
                assert not any(map(is_expert, both)) and {*names_0} | {*names_1} == {*sizes}
                assert bytes_0 + bytes_1 == experts + 2 * (sum(sizes.values()) - experts)
            elif layout == "dualpipev":  # rank 0 has the first and the last stage, which share the embedding
                assert not both and bytes_0 + bytes_1 == sum(sizes.values())
            else:  # the last stage needs the tied embedding, too
                assert both == {"embedding.weight"}
                assert bytes_0 + bytes_1 == sum(sizes.values()) + sizes["embedding.weight"]
