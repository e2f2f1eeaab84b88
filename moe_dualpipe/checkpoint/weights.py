"""The weights of a checkpoint: as a model, or exported as safetensors to share.

A checkpoint has several files, which also hold optimizer moments and master weights. An exported folder holds only

    model.safetensors    the fp32 weights, under the checkpoint's global names
    config.json          the model, with `model_type` "moe-dualpipe"
    tokenizer.json       unless the tokenizer is bytes
    checksums.json       size and CRC-32 of the other files, which are compared when the folder is read

Neither format can run code when it is loaded.
"""

import dataclasses
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..data import TOKENIZER_FILE
from ..expert_parallel.gather import gather_objects
from ..expert_parallel.parameters import ExpertIds, expert_ids, global_tensors, older_names
from ..messages import printable
from ..models import ModelConfig, TransformerStage, build_model
from ..models.layer_class import Factory
from ..runtime.shared_errors import raise_on_all_ranks
from .atomic_folder import check_new, new_folder
from .load import load_checkpoint
from .manifest import read_manifest, read_tensor_metadata
from .model_options import check_sizes, model_config, with_named_layers
from .partial import group_names
from .tensor_writer import TensorWriter, as_dtype

WEIGHTS_FILE, CONFIG_FILE, MODEL_TYPE = "model.safetensors", "config.json", "moe-dualpipe"
OwnLayer = str | Factory | None
"""A layer by its name, a class, or a function; None: built in."""
PREFIX = "model."  # a checkpoint puts it before the names of weights


def load_model(
    checkpoint: Path, experts: OwnLayer = None, router: OwnLayer = None, attention: OwnLayer = None,
    block: OwnLayer = None,
) -> TransformerStage:  # fmt: skip
    """Build the whole model of a checkpoint in fp32.

    experts, router, attention, block: custom layers of this model. A checkpoint never decides which class is
    imported, so they must be named. Raises ValueError if the checkpoint is unreadable or has other layers.
    """
    config = saved_model(checkpoint, {"experts": experts, "router": router, "attention": attention, "block": block})
    model = build_model(config)
    state = {PREFIX + name: tensor for name, tensor in global_weights(model).items()}
    load_checkpoint(checkpoint, state, older_names([model]))
    return model


def saved_model(checkpoint: Path, named: Mapping[str, OwnLayer]) -> ModelConfig:
    """The model of a checkpoint, with its custom layers. named, and errors: as in `load_model`."""
    tensors = read_tensor_metadata(checkpoint).state_dict_metadata.items()
    shapes = [t.size for name, t in tensors if name.startswith(PREFIX) and isinstance(t, TensorStorageMetadata)]
    try:
        config = model_config(read_manifest(checkpoint).model)
        check_sizes(config, shapes)
    except ValueError as error:
        raise ValueError(f"cannot build the model of {checkpoint}: {printable(error)}") from None
    return with_named_layers(config, named, str(checkpoint))


def global_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a whole model by global name, as views."""
    ids = expert_ids(model)
    return {
        global_name: view
        for name, tensor in model.state_dict().items()
        for global_name, view in global_tensors(name, tensor, ids.get(name))
    }


def export_weights(checkpoint: Path, folder: Path, **own_layers: OwnLayer) -> int:
    """Write the weights of a checkpoint into a new folder and return the number of parameters.

    own_layers: the custom layers of this model, as in `load_model`.
    Holds one copy of the weights in memory. Raises ValueError if the checkpoint is unreadable, if `folder` exists, or
    if a weight is not finite, and OSError if it could not be written; then nothing is left of it.
    """
    check_new(folder)
    model = load_model(checkpoint, **own_layers)
    weights = global_weights(model)
    total = sum(tensor.nbytes for tensor in weights.values())
    config = {"model_type": MODEL_TYPE, **dataclasses.asdict(model.config)}
    try:
        with new_folder(folder, checksums=True) as unfinished:
            writer = TensorWriter(unfinished, {name: (t.dtype, t.shape) for name, t in weights.items()}, total)
            for name, tensor in weights.items():
                writer.write(name, as_dtype(name, tensor, tensor.dtype))
            writer.close()
            (unfinished / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
            if (tokenizer := checkpoint / TOKENIZER_FILE).is_file():
                shutil.copyfile(tokenizer, unfinished / TOKENIZER_FILE)
    except OSError as error:
        raise OSError(f"{printable(folder)} could not be written: {printable(error, 1000)}") from None
    return sum(tensor.numel() for tensor in weights.values())


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
