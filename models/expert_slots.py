"""The names of experts that are not in the order of their ids, in checkpoints (expert_parallel/slots.py).

The tensors of a layer are named by slots, which are numbered over all ranks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from moe_dualpipe.expert_parallel.parameters import ExpertIds, expert_ids, global_tensors

from .moe import MoE


def expert_tensors(stages: Iterable[nn.Module]) -> dict[int, list[tuple[str, Tensor, ExpertIds]]]:
    """The parameters and buffers of the experts of each layer: their names, and which slots they hold."""
    found = {}
    for stage in stages:
        held = expert_ids(stage)
        tensors = dict((*stage.named_parameters(), *stage.named_buffers()))
        for prefix, module in stage.named_modules():
            if isinstance(module, MoE):
                names = [name for name in held if name.startswith(f"{prefix}.experts.") and name in tensors]
                found[module.layer] = [(n, tensors[n], held[n]) for n in sorted(names, key=lambda n: held[n].name)]
    return found


def names_by_expert(
    stages: Iterable[nn.Module], experts: Mapping[int, Sequence[int]]
) -> Iterator[tuple[str, str, Tensor]]:
    """The global names of all slots, the names of the experts in them, and the tensors.

    experts: those in the slots of each layer.
    """
    for layer, tensors in expert_tensors(stages).items():
        for name, tensor, held in tensors:
            for slot, (slot_name, view) in zip(held.ids, global_tensors(name, tensor, held), strict=False):
                yield slot_name, held.name.replace("*", str(experts[layer][slot])), view
