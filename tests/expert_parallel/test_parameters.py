"""Which experts a tensor holds, and its global names."""

import torch
from torch import nn

from moe_dualpipe.expert_parallel.parameters import expert_ids, global_tensors


class Layer(nn.Module):
    """An expert layer with two local experts, some lists and sizes that are 2 by chance, and an ordinary layer."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.zeros(2, 3))
        self.each = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.scales = nn.ParameterList(nn.Parameter(torch.zeros(2)) for _ in range(2))
        self.stages = nn.ModuleList(nn.ModuleList(nn.Linear(1, 2, bias=False) for _ in range(2)) for _ in range(2))
        self.mix = nn.Linear(2, 2, bias=False)
        self.register_buffer("seen", torch.zeros(2))
        self.local_experts = range(4, 6)
        self.per_expert = frozenset({"up", "each", "scales", "stages.0", "stages.1", "seen"})


def names(module):
    held = expert_ids(module)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: [global_name for global_name, _ in global_tensors(name, t, held.get(name))] for name, t in tensors}


def test_parameters_and_buffers_are_stacked_listed_or_shared():
    assert names(nn.ModuleDict({"mlp": Layer(), "head": nn.Linear(2, 2, bias=False)})) == {
        "mlp.up": ["mlp.up.4", "mlp.up.5"], "mlp.seen": ["mlp.seen.4", "mlp.seen.5"],
        "mlp.each.0.weight": ["mlp.each.4.weight"], "mlp.each.0.bias": ["mlp.each.4.bias"],
        "mlp.each.1.weight": ["mlp.each.5.weight"], "mlp.each.1.bias": ["mlp.each.5.bias"],
        "mlp.scales.0": ["mlp.scales.4"], "mlp.scales.1": ["mlp.scales.5"],
        "mlp.stages.0.0.weight": ["mlp.stages.0.4.weight"], "mlp.stages.0.1.weight": ["mlp.stages.0.5.weight"],
        "mlp.stages.1.0.weight": ["mlp.stages.1.4.weight"], "mlp.stages.1.1.weight": ["mlp.stages.1.5.weight"],
        "mlp.mix.weight": ["mlp.mix.weight.4-5"], "head.weight": ["head.weight"],
    }  # fmt: skip
    layer = Layer()
    del layer.per_expert  # then the sizes decide
    found = names(layer)
    assert (found["up"], found["each.1.bias"]) == (["up.4", "up.5"], ["each.5.bias"])
    assert found["mix.weight"] == ["mix.weight.4", "mix.weight.5"]  # a size that equals theirs by chance
