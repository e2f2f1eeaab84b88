"""Global names of expert parameters."""

import torch

from moe_dualpipe.expert_parallel.parameters import global_tensors


def test_stacked_experts_are_named_one_by_one_by_their_global_number():
    stacked = torch.arange(6.0).view(3, 2)
    named = dict(global_tensors("layers.1.mlp.experts.up", stacked, range(3, 6)))
    assert {name: t.tolist() for name, t in named.items()} == {
        "layers.1.mlp.experts.up.3": [0, 1], "layers.1.mlp.experts.up.4": [2, 3], "layers.1.mlp.experts.up.5": [4, 5],
    }  # fmt: skip
    named["layers.1.mlp.experts.up.4"].fill_(9)
    assert stacked[1].tolist() == [9, 9]  # views: loading into them loads the parameter
    assert [*dict(global_tensors("head.weight", stacked, None))] == ["head.weight"]
    own = dict(global_tensors("layers.1.mlp.experts.mix.weight", stacked, range(4, 8)))
    assert [*own] == ["layers.1.mlp.experts.mix.weight.4-7"]
