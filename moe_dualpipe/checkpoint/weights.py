"""The weights of a model by global name, in a run and in a folder that `moe-dualpipe export` wrote:

model.safetensors    the fp32 weights, under the checkpoint's global names
config.json          the model, with `model_type` "moe-dualpipe"
tokenizer.json       unless the tokenizer is bytes
checksums.json       size and CRC-32 of the other files, which are compared when the folder is read
"""

import dataclasses
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ..expert_parallel.gather import gather_objects
from ..expert_parallel.parameters import ExpertIds, expert_ids, global_tensors
from ..models.layer_class import Factory
from ..runtime.shared_errors import raise_on_all_ranks
from .partial import group_names

WEIGHTS_FILE, CONFIG_FILE, MODEL_TYPE = "model.safetensors", "config.json", "moe-dualpipe"
OwnLayer = str | Factory | None
"""A layer by its name, a class, or a function; None: built in."""
PREFIX = "model."  # a checkpoint puts it before the names of weights


def global_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a whole model by global name, as views."""
    ids = expert_ids(model)
    return {
        global_name: view
        for name, tensor in model.state_dict().items()
        for global_name, view in global_tensors(name, tensor, ids.get(name))
    }


@torch.no_grad()
def load_tensors(
    weights: Mapping[str, Tensor], num_experts: int, state: Mapping[str, Tensor], stages: Iterable[nn.Module]
) -> None:
    """Copy `weights` into the weights of `state`, in place. Collective.

    weights: all weights of a model, the same on all ranks: its state dict as one stage, or tensors by global name.
    num_experts: of a layer, on all ranks. state: this rank's part of the model. stages: the modules that hold it.

    Raises ValueError on all ranks if on any rank a weight is missing or has another shape, and for a weight that no
    rank has; then no rank has copied anything.
    """
    ids = {name: held for stage in stages for name, held in expert_ids(stage).items()}
    given, names, fault = {}, {}, ""  # by global name: the tensor, and its name in `weights`
    for name, tensor in weights.items():
        try:
            parts = _by_global_name(name, tensor, ids.get(name), num_experts)
        except ValueError as error:
            fault, parts = str(error), {}
        given |= parts
        names |= dict.fromkeys(parts, name)
    own = {name.removeprefix(PREFIX): tensor for name, tensor in state.items() if name.startswith(PREFIX)}
    faults = (_fault(name, tensor, given.get(name)) for name, tensor in own.items())
    raise_on_all_ranks(fault or next(filter(None, faults), ""))
    if surplus := weights.keys() - set().union(*gather_objects({names[name] for name in own if name in names})):
        raise ValueError(f"`weights` has names that the model does not have: {group_names(surplus)}")
    for name, tensor in own.items():
        tensor.copy_(given[name])


def _by_global_name(name: str, tensor: Tensor, held: ExpertIds | None, num_experts: int) -> dict[str, Tensor]:
    """A given tensor, which may hold all experts of a layer, by global name. held: what this rank holds of it."""
    if held is None or held.layout == "listed":  # a list has global names in the state dict of a whole model
        return {name: tensor}
    if held.layout == "shared":
        return dict(global_tensors(name, tensor, held)) if len(held.ids) == num_experts else {name: tensor}
    if not isinstance(tensor, Tensor) or tensor.shape[:1] != (num_experts,):
        got = [*tensor.shape] if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"`weights`: {name} must stack the {num_experts} experts of the layer: got {got}")
    return dict(global_tensors(name, tensor, dataclasses.replace(held, ids=range(num_experts))))


def _fault(name: str, tensor: Tensor, given: object) -> str:
    """What is wrong with a given weight; "" if nothing is."""
    if given is None:
        return f"`weights` has no {name}: it must have all weights of the model"
    if not isinstance(given, Tensor):
        return f"`weights`: {name} is not a tensor, but {type(given).__name__}"
    if given.shape != tensor.shape:
        return f"`weights`: {name} has shape {[*given.shape]}, expected {[*tensor.shape]}"
    return ""
