"""Custom expert layers: the names and ids of their tensors, initial weights that do not depend on ranks, and errors."""

import pytest
import torch
from torch import nn

from moe_dualpipe.expert_parallel.parameters import expert_ids, global_tensors
from moe_dualpipe.models.build_experts import ExpertBuilder
from tests.support import custom_experts
from tests.support.models import with_choices

E = 8
PARTS = [(n, start) for n in (8, 4, 2, 1) for start in range(0, E, n)]


def builder(name, layer=1, seed=3, **choices):
    return ExpertBuilder(with_choices(num_experts=E, experts=name, **choices), layer, seed)


def named(layer):
    """Weights and persistent buffers by global name."""
    held = expert_ids(layer)
    return {
        global_name: view
        for name, tensor in layer.state_dict().items()
        for global_name, view in global_tensors(name, tensor, held.get(name))
    }


@pytest.mark.parametrize("hidden", [2, 8])  # equal to the number of local experts, of some ranks
@pytest.mark.parametrize("name,tensors", [
    ("Stacked", {"scale", "bias", *(f"{kind}.{e}" for kind in ("up", "shift") for e in range(E))}),
    ("WithReset", {"scale", "bias", *(f"{kind}.{e}" for kind in ("up", "shift") for e in range(E))}),
    ("Listed", {f"each.{e}.{kind}" for kind in ("weight", "bias") for e in range(2, E)}),
    ("ListsOfStacks", {f"stages.{i}.weight.{e}" for i in range(2) for e in range(E)}),
    ("Expert", {f"each.{e}.{kind}.weight" for kind in ("gate_up", "down") for e in range(E)}),
    ("swiglu_function", {f"{kind}.{e}" for kind in ("gate_up", "down") for e in range(E)}),
])  # fmt: skip
def test_initial_weights_are_the_same_for_any_number_of_ranks(name, tensors, hidden):
    """Whatever size equals the number of local experts by chance."""
    path = f"tests.support.{'custom_experts' if hasattr(custom_experts, name) else 'own_layers'}:{name}"
    of_class = builder(path, hidden_size=hidden)
    state = torch.random.get_rng_state()
    whole = named(of_class.build(range(E)))
    assert set(whole) == tensors
    found = []
    for number, start in PARTS:
        part = named(of_class.build(range(start, start + number)))
        found += part
        for key, tensor in part.items():
            assert torch.equal(tensor, whole[key]), (key, number, start)
    assert set(found) == tensors
    assert torch.equal(state, torch.random.get_rng_state())
    values = [tensor.flatten()[0].item() for tensor in whole.values()]
    assert len(set(values)) == len(values)  # no two tensors are drawn with one seed
    other = named(builder(path, layer=2, hidden_size=hidden).build(range(E)))
    assert not any(torch.equal(tensor, other[key]) for key, tensor in whole.items())


# ---- Layers whose initial weights would depend on the number of ranks ----


class SecondDimension(nn.Module):
    def __init__(self, _config, num_local_experts):
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, num_local_experts))


class SecondDimensionWithReset(SecondDimension):
    def reset_expert(self, e):
        with torch.no_grad():
            self.up[:, e].normal_()


class OwnSeed(nn.Module):
    def __init__(self, _config, num_local_experts):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up = nn.Parameter(torch.randn(num_local_experts, 3, generator=generator))


class Tied(nn.ModuleList):
    """All experts have one `up`; `down` is used twice, but by one expert."""

    def __init__(self, config, num_local_experts):
        up = nn.Linear(config.hidden_size, config.hidden_size)
        downs = [nn.Linear(config.hidden_size, config.hidden_size) for _ in range(num_local_experts)]
        super().__init__(nn.Sequential(up, down, down) for down in downs)


class ById(nn.Module):
    def __init__(self, _config, _num_local_experts, expert_ids):
        super().__init__()
        self.register_buffer("rank", torch.tensor(expert_ids))


@pytest.mark.parametrize("name,problem", [
    ("SecondDimension", r"up has shape \[3, 4\] in a layer with experts 4-7, and shape \[3, 1\] in one with expert 0 "),
    ("OwnSeed", r"up.4 and up.7 differ if the experts are built together, and are equal if each expert is built alon"),
    ("Tied", "each.0.0.weight and each.1.0.weight are one parameter, of which each rank would train its own copy: use "
     "--ep 1, or make it a parameter of the layer, outside of the list of experts$"),
])  # fmt: skip
def test_weights_that_cannot_be_drawn_expert_by_expert(name, problem):
    with pytest.raises(ValueError, match=f"the expert layer 'tests.models.test_build_experts:{name}': {problem}"):
        builder(f"tests.models.test_build_experts:{name}").build(range(4, 8))


def test_ids_and_reset_expert_mend_them():
    by_id = builder("tests.models.test_build_experts:ById").build(range(4, 8))
    assert torch.equal(by_id.get_buffer("rank"), torch.arange(4, 8))
    of_class = builder("tests.models.test_build_experts:SecondDimensionWithReset")
    whole, half = of_class.build(range(8)), of_class.build(range(4, 8))
    assert torch.equal(whole.up[:, 4:], half.up)
    assert expert_ids(half)["up"].layout == "shared"


# ---- Names of tensors ----


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
