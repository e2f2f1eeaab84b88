"""Global names of expert parameters."""

import torch

from moe_dualpipe.expert_parallel.parameters import global_tensors


def test_each_expert_has_its_own_global_name():
    stacked = torch.arange(6.0).view(3, 2)
    named = dict(global_tensors("layers.1.mlp.experts.up", stacked, range(3, 6)))
    assert {name: t.tolist() for name, t in named.items()} == {
        "layers.1.mlp.experts.up.3": [0, 1], "layers.1.mlp.experts.up.4": [2, 3], "layers.1.mlp.experts.up.5": [4, 5],
    }  # fmt: skip
    named["layers.1.mlp.experts.up.4"].fill_(9)
    assert stacked[1].tolist() == [9, 9]  # the tensors are views of the parameter
    assert [*dict(global_tensors("head.weight", stacked, None))] == ["head.weight"]
    not_stacked = dict(global_tensors("layers.1.mlp.experts.mix.weight", stacked, range(4, 8)))
    assert [*not_stacked] == ["layers.1.mlp.experts.mix.weight.4-7"]
