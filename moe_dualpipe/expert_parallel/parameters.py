"""Which tensors belong to routed experts, and names of tensors that are the same in every parallel layout.

An expert layer holds the parameters and buffers of this rank's experts. Code that treats them differently (gradient
sums, optimizer state, checkpoints) reads two attributes of the layer, which `MoE` sets:

    local_experts    the global ids of the experts, a range
    per_expert       the names of what has one entry for each of them: parameters and buffers that stack the experts
                     along their first dimension, and lists with one module or parameter per expert. Default: everything
                     that has as many entries as the rank has experts
    common           the names of what all experts of all ranks share. It belongs to no expert: like everything outside
                     the layer, it has a replica on each of these ranks. Default: nothing
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class ExpertIds:
    """Which experts a tensor of an expert layer holds.

    ids: the global ids of these experts. layout: "stacked", one expert for each index of the first dimension; "listed",
    one expert, whose module or parameter is in a list; "shared", all experts of the rank, in a form that only the layer
    knows. name: the global name; * stands for the id of an expert. Examples: `up.*`, `up.*.weight`, `mix.4-7`.
    """

    ids: range
    layout: Literal["stacked", "listed", "shared"]
    name: str


def expert_ids(module: nn.Module) -> dict[str, ExpertIds]:
    """Map the names of the parameters and buffers of the expert layers in `module` to the experts that they hold."""
    return {
        _join(prefix, name): _held(prefix, name, ids, per_expert)
        for prefix, layer, ids in _expert_layers(module)
        for per_expert in [getattr(layer, "per_expert", entries(layer, len(ids)))]
        for name, _ in chain(
            layer.named_parameters(remove_duplicate=False), layer.named_buffers(remove_duplicate=False)
        )
        if name not in getattr(layer, "common", ())
    }


def global_tensors(name: str, tensor: Tensor, held: ExpertIds | None) -> Iterator[tuple[str, Tensor]]:
    """The global names under which a tensor with the shape of a parameter or buffer is saved, each with a view of it.

    held: the experts that the tensor holds; None for tensors outside expert layers.

    Examples, on the rank with experts 4 and 5: `mlp.experts.up` of shape [2, F, D] -> `mlp.experts.up.4` and
    `mlp.experts.up.5`, each [F, D]. `mlp.experts.each.1.weight` -> `mlp.experts.each.5.weight`. A "shared" tensor is
    saved whole, as `mlp.experts.mix.4-5`, and can be loaded only with as many expert-parallel ranks.
    """
    if held is None:
        yield name, tensor
    elif held.layout == "stacked":
        yield from ((held.name.replace("*", str(expert)), tensor[i]) for i, expert in enumerate(held.ids))
    else:
        yield held.name.replace("*", str(held.ids.start)), tensor


def entries(layer: nn.Module, number: int) -> frozenset[str]:
    """The names of the parameters, buffers, and lists of modules or parameters in `layer` with `number` entries."""
    tensors = chain(layer.named_parameters(remove_duplicate=False), layer.named_buffers(remove_duplicate=False))
    lists = ((n, m) for n, m in layer.named_modules() if isinstance(m, nn.ModuleList | nn.ParameterList))
    sizes = chain(((n, t.shape[0]) for n, t in tensors if t.ndim), ((n, len(m)) for n, m in lists))
    return frozenset(name for name, size in sizes if size == number)


def _expert_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module, range]]:
    for prefix, layer in module.named_modules():
        if isinstance(ids := getattr(layer, "local_experts", None), range):
            yield prefix, layer, ids


def _held(prefix: str, name: str, ids: range, per_expert: frozenset[str]) -> ExpertIds:
    parts = name.split(".")
    for i in range(1, len(parts)):
        if ".".join(parts[:i]) in per_expert and parts[i].isdigit():
            expert = ids[int(parts[i])]
            return ExpertIds(range(expert, expert + 1), "listed", _join(prefix, *parts[:i], "*", *parts[i + 1 :]))
    if name in per_expert:
        return ExpertIds(ids, "stacked", _join(prefix, name, "*"))
    return ExpertIds(ids, "shared", _join(prefix, name, f"{ids.start}-{ids.stop - 1}"))


def _join(*names: str) -> str:
    return ".".join(filter(None, names))
