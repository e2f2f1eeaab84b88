"""Load the model and the tokenizer of a run, a checkpoint, an export, or a published model; export its weights."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

from ..data import TOKENIZER_FILE, Tokenizer, find_tokenizer, stores
from ..expert_parallel import ExpertParallel
from ..messages import printable
from ..models import ModelConfig, MoE, TransformerStage, build_model
from ..models.expert_slots import names_by_expert
from ..runtime.launch import choose_device, count_gpus
from .atomic_folder import write_folder
from .huggingface import from_pretrained
from .load import find_checkpoint
from .manifest import EXPORT_FILE, FileChecksum, Manifest
from .tensor_file import write_tensors
from .tensor_writer import as_dtype
from .weights import CONFIG_FILE, MODEL_TYPE, PREFIX, WEIGHTS_FILE, OwnLayer, global_weights
from .weights_folder import is_published, load_model, load_weights, model_of, saved_model, start_tokenizer


def open_model(
    path: str, own_layers: Mapping[str, OwnLayer] | None = None, device: Literal["auto", "cpu", "cuda"] = "cpu"
) -> tuple[TransformerStage, Tokenizer]:
    """Load a model with its tokenizer, on a device, for inference.

    path: the folder, or URL, of a run (its newest checkpoint is used), of a checkpoint, from `moe-dualpipe export`, or
    of a published model in Hugging Face's format.
    own_layers: the model's own layers, as for `load_model`. device: cpu (in fp32), cuda (in bf16), or auto: cuda if
    there is a GPU.

    Raises ValueError for a folder without a model, for one that is broken, and for wrong `own_layers`.
    """
    chosen = torch.device(choose_device(device, count_gpus(), 1))
    folder, published = _find_folder(path, own_layers)
    dtype = torch.float32 if chosen.type == "cpu" else torch.bfloat16
    if published:
        model = from_pretrained(folder, dtype).to(chosen)
        return model, start_tokenizer(folder, model.config.vocab_size)
    return load_model(folder, **(own_layers or {})).to(chosen, dtype), find_tokenizer(folder)


def _find_folder(path: str, own_layers: Mapping[str, OwnLayer] | None) -> tuple[Path, bool]:
    """The folder of a model, and whether it is of a published model. Raises ValueError."""
    folder = stores.local_path(path)
    stores.open_folder(folder)
    folder = folder if (folder / CONFIG_FILE).is_file() else find_checkpoint(path)
    published = is_published(folder)
    if published and (named := [field for field, layer in (own_layers or {}).items() if layer is not None]):
        raise ValueError(
            f"{printable(folder)} is a published model, without layers of your own: leave out --{named[0]}"
        )
    return folder, published


def find_model(path: str, own_layers: Mapping[str, OwnLayer] | None = None) -> tuple[Path, ModelConfig]:
    """The folder or checkpoint with a model, and its options. Arguments and errors are those of `open_model`."""
    folder, published = _find_folder(path, own_layers)
    return folder, model_of(folder) if published else saved_model(folder, own_layers or {})[1]


def load_spread_model(
    folder: Path, config: ModelConfig, expert_parallel: ExpertParallel, experts: Mapping[int, Sequence[int]]
) -> TransformerStage:
    """Build a model in fp32 whose experts are spread over ranks. Reads only this rank's weights. Collective.

    folder, config: from `find_model`. expert_parallel: a backend for all slots. experts: the expert in each slot, for
    the layers in which they are not in the order of their ids.

    Raises ValueError, on all ranks, for a folder that is broken or has other weights.
    """
    model = build_model(config, expert_parallel)
    layers = {moe.layer: moe for moe in model.modules() if isinstance(moe, MoE)}
    if experts and experts.keys() != layers.keys():
        placed, have = (", ".join(map(str, sorted(found))) for found in (experts, layers))
        raise ValueError(f"{folder}: copies are placed for layers {placed}, but its model has experts in layers {have}")
    in_order = [*range(config.num_experts)]
    weights = global_weights(model)
    named = names_by_expert([model], {layer: experts.get(layer, in_order) for layer in layers})
    name_of_slot = {slot_name: name for slot_name, name, _ in named}
    names = {slot_name: name_of_slot.get(slot_name, slot_name) for slot_name in weights}
    state = {PREFIX + names[slot_name]: tensor for slot_name, tensor in weights.items()}
    load_weights(folder, state)
    with torch.no_grad():
        for slot_name, tensor in weights.items():  # of several copies of an expert on this rank, one has been loaded
            tensor.copy_(state[PREFIX + names[slot_name]])
    for layer, slots in experts.items():
        layers[layer].place(slots)
    return model


def export_weights(checkpoint: Path, folder: Path, **own_layers: OwnLayer) -> int:
    """Write the weights of a checkpoint into a new folder and return the number of parameters.

    own_layers: the custom layers of this model, as in `load_model`.
    Holds one copy of the weights in memory. Raises ValueError if the checkpoint is unreadable, if `folder` exists, or
    if a weight is not finite, and OSError if it could not be written; then nothing is left of it.
    """
    model = load_model(checkpoint, **own_layers)
    weights = global_weights(model)
    config = {"model_type": MODEL_TYPE, **dataclasses.asdict(model.config)}
    files = {name: (checkpoint / name).read_bytes() for name in (TOKENIZER_FILE,) if (checkpoint / name).is_file()}
    files[CONFIG_FILE] = (json.dumps(config, indent=2) + "\n").encode()

    def write(unfinished: Path) -> dict[str, FileChecksum]:
        write_tensors(unfinished / WEIGHTS_FILE, {name: as_dtype(name, t, t.dtype) for name, t in weights.items()})
        return {WEIGHTS_FILE: FileChecksum.of_file(unfinished / WEIGHTS_FILE)}

    def last(written: list[dict[str, FileChecksum]]) -> dict[str, bytes]:
        checksums = written[0] | {name: FileChecksum.of(data) for name, data in files.items()}
        return {EXPORT_FILE: Manifest(0, {}, checksums).encode(), **files}

    try:
        write_folder(folder, write, last)
    except OSError as error:
        raise OSError(f"{printable(folder)} could not be written: {printable(error, 1000)}") from None
    return sum(tensor.numel() for tensor in weights.values())
