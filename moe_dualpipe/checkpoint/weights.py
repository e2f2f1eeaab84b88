"""Weights without their run: a checkpoint's as a model, and as safetensors, which can be given away.

A checkpoint holds moments and masters, and is divided among files. An exported folder holds the fp32 weights alone,

    model.safetensors    the weights, by the checkpoint's global names
    config.json          what the model is, with `model_type` "moe-dualpipe"
    tokenizer.json       if it has one other than bytes

and neither format can do anything but hold numbers, whoever wrote it.
"""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..data import TOKENIZER_FILE
from ..expert_parallel.parameters import expert_ids, global_tensors
from ..models import ModelConfig, TransformerStage, build_model
from .load import load_checkpoint, model_differences
from .manifest import read_manifest

WEIGHTS_FILE, CONFIG_FILE, MODEL_TYPE = "model.safetensors", "config.json", "moe-dualpipe"
_MODEL = "model."  # what weights are called in a checkpoint begins with it


def load_model(checkpoint: Path, experts: str = "swiglu") -> TransformerStage:
    """The model of a checkpoint, whole, in fp32.

    Raises ValueError for one that cannot be read, or has experts other than `experts`: a class that a checkpoint names
    is not imported unless the user names it, too.
    """
    try:
        config = ModelConfig(**read_manifest(checkpoint).model)
    except TypeError as error:
        raise ValueError(f"cannot read the model of {checkpoint}: {error}") from None
    if config.experts != experts:
        raise ValueError(
            f"{checkpoint} has experts {config.experts!r}, not {experts!r}: "
            f"if you trust them, say so with --experts {config.experts}"
        )
    model = build_model(config)
    load_checkpoint(checkpoint, {_MODEL + name: tensor for name, tensor in global_weights(model).items()})
    return model


def global_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a whole model by global names, as views."""
    ids = expert_ids(model)
    return {
        global_name: view
        for name, tensor in model.state_dict().items()
        for global_name, view in global_tensors(name, tensor, ids.get(name))
    }


def export_weights(checkpoint: Path, folder: Path, experts: str = "swiglu") -> int:
    """Write the weights of a checkpoint into a new folder; returns how many numbers. Needs memory for all of them.

    Raises ValueError for a checkpoint that cannot be read, and where the folder exists.
    """
    from safetensors.torch import save_file

    if folder.exists():
        raise ValueError(f"{folder} exists already: choose a folder that does not")
    model = load_model(checkpoint, experts)
    weights = {name: tensor.contiguous().clone() for name, tensor in global_weights(model).items()}
    folder.mkdir(parents=True)
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config = {"model_type": MODEL_TYPE, **dataclasses.asdict(model.config)}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    if (checkpoint / TOKENIZER_FILE).is_file():
        shutil.copyfile(checkpoint / TOKENIZER_FILE, folder / TOKENIZER_FILE)
    return sum(tensor.numel() for tensor in weights.values())


def check_weights(folder: Path, model: ModelConfig) -> None:
    """Raises ValueError unless `folder` is an exported one, of `model`."""
    if not (folder / WEIGHTS_FILE).is_file() or not (folder / CONFIG_FILE).is_file():
        raise ValueError(f"--weights {folder} must hold {WEIGHTS_FILE} and {CONFIG_FILE} from moe-dualpipe export")
    try:
        saved = json.loads((folder / CONFIG_FILE).read_text())
    except (ValueError, OSError) as error:
        raise ValueError(f"cannot read {folder / CONFIG_FILE}: {error}") from None
    if not isinstance(saved, dict) or saved.pop("model_type", None) != MODEL_TYPE:
        raise ValueError(f"{folder / CONFIG_FILE} is not of a model that moe-dualpipe export wrote")
    if differences := model_differences(saved, model):
        raise ValueError(f"{folder} holds another model: {'; '.join(differences)}")


def load_weights(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Load into what of `state` are weights, in place, reading no more of the file than that. Collective.

    Raises ValueError, on all ranks alike, for a file that is broken, lacks one of them, or has it in another shape.
    """
    fault = ""
    try:
        _load(folder, state)
    except ValueError as error:
        fault = str(error)
    faults = [fault]
    if dist.is_initialized():  # one rank alone may miss a weight
        faults *= dist.get_world_size()
        dist.all_gather_object(faults, fault)
    if found := [fault for fault in faults if fault]:
        raise ValueError(found[0])


@torch.no_grad()
def _load(folder: Path, state: Mapping[str, Tensor]) -> None:
    from safetensors import SafetensorError, safe_open

    wanted = {name.removeprefix(_MODEL): tensor for name, tensor in state.items() if name.startswith(_MODEL)}
    try:
        with safe_open(folder / WEIGHTS_FILE, "pt") as file:
            there = set(file.keys())
            if lacking := sorted(set(wanted) - there):
                raise ValueError(f"{folder / WEIGHTS_FILE} lacks {lacking[0]}, and {len(lacking) - 1} more")
            for name, tensor in wanted.items():
                shape = file.get_slice(name).get_shape()
                if shape != [*tensor.shape]:
                    raise ValueError(f"{folder / WEIGHTS_FILE} has {name} as {shape}, not as {[*tensor.shape]}")
                tensor.copy_(file.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"cannot read {folder / WEIGHTS_FILE}: {error}") from None
