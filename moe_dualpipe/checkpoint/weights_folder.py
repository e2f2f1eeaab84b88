"""Load the weights in a folder: of a run or checkpoint, or of a published model in Hugging Face's format.

Tensors are read one at a time by their global names, so a rank reads only those that it holds.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ..data import TOKENIZER_FILE, Tokenizer, UnknownTokenizer, find_tokenizer, stores
from ..data.strict_json import read_named
from ..expert_parallel import ExpertParallel
from ..expert_parallel.gather import gather_objects
from ..messages import printable, quoted
from ..models import ModelConfig, MoE, TransformerStage, build_model
from ..models.expert_slots import names_by_expert
from ..runtime.launch import choose_device, count_gpus
from ..runtime.shared_errors import errors_on_all_ranks
from .huggingface import CONFIG_FILE, PublishedModel, from_pretrained
from .load import differences, find_checkpoint
from .weights import PREFIX, OwnLayer, PartialLoad, SavedModel, global_weights, group_names

_WHY_MISSING = "a frozen weight must stay frozen, and custom experts may need the same --ep (docs/custom_layers.md)"
WeightsFolder = SavedModel | PublishedModel


def find_weights(path: str) -> Path:
    """The folder of a published model at `path`, or the checkpoint found there. Errors: as in `find_checkpoint`."""
    folder = stores.local_path(path)
    stores.open_folder(folder)
    if is_published(folder):
        return folder
    if (folder / CONFIG_FILE).is_file():
        raise ValueError(
            f"{printable(folder)} is neither a run nor a published model: convert what an earlier version exported "
            "with examples/convert_checkpoint.py"
        )
    return find_checkpoint(path)


def is_published(folder: Path) -> bool:
    """Whether config.json in `folder` is that of a published model. Raises ValueError if it cannot be read."""
    path = folder / CONFIG_FILE
    config = read_named(path) if path.is_file() else None
    return isinstance(config, dict) and config.get("model_type") not in (None, "moe-dualpipe")


def open_weights(folder: Path) -> WeightsFolder:
    """Open what `find_weights` has found. Raises ValueError if it is broken."""
    return (PublishedModel if is_published(folder) else SavedModel)(folder)


def start_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of the model in a folder or checkpoint. Unknown for a published model without tokenizer.json."""
    if is_published(folder) and not (folder / TOKENIZER_FILE).is_file():
        return UnknownTokenizer(vocab_size)
    return find_tokenizer(folder)


def load_model(
    folder: Path, experts: OwnLayer = None, router: OwnLayer = None, attention: OwnLayer = None, block: OwnLayer = None
) -> TransformerStage:
    """Build the whole model of a checkpoint, in fp32.

    experts, router, attention, block: custom layers of this model. A checkpoint never decides which class is imported,
    so they must be named. Raises ValueError if the checkpoint is broken or has other layers.
    """
    saved = SavedModel(folder)
    named = {"experts": experts, "router": router, "attention": attention, "block": block}
    model = build_model(saved.config_with(named))
    load_state(lambda: saved, global_weights(model), "")
    return model


def check_weights(folder: Path, model: ModelConfig, partial: bool = False) -> list[str]:
    """Return the options in which the model of `folder` differs from `model`, one message each.

    Raises ValueError if the folder is broken, and without `partial` if it has another model. The MTP modules of a
    published model may be left out.
    """
    opened = open_weights(folder)
    without_mtp = isinstance(opened, PublishedModel) and not model.mtp_layers
    found = differences(opened.config, model, frozenset({"mtp_layers"} if without_mtp else ()))
    if found and not partial:
        way_out = "--weights-partial loads the weights that both have"
        raise ValueError(f"{printable(folder)} holds another model: {'; '.join(found)}; {way_out}")
    return found


@torch.no_grad()
def load_state(
    open_folder: Callable[[], WeightsFolder], state: Mapping[str, Tensor], different: str, partial: bool = False
) -> PartialLoad:
    """Load into the tensors of `state` in place. Collective if torch.distributed is initialized.

    different: the error if ranks open different folders. partial: load only what the folder has, at least one tensor.
    Returns the names, with `partial` those of all ranks.

    Raises ValueError or OSError on all ranks if on any rank a tensor is missing, has another shape, or cannot be read.
    """
    with errors_on_all_ranks():
        opened = open_folder()
        shapes = opened.shapes
        missing = {name for name in state if name not in shapes} if partial else set()
        found = {name: tensor for name, tensor in state.items() if name not in missing}
        _check_shapes(opened.where, found, shapes)
        checksum = opened.checksum
    if len({*gather_objects(checksum)}) > 1:
        raise ValueError(different)
    ranks = gather_objects(({*found}, missing)) if partial else [({*found}, missing)]
    loaded, missing = (set().union(*names) for names in zip(*ranks, strict=True))
    result = PartialLoad(sorted(loaded), sorted(missing), sorted(shapes.keys() - loaded))
    if partial and not loaded:
        has, wanted = group_names(result.ignored) or "no tensors", group_names(missing)
        raise ValueError(f"{opened.where} has no weight of the model: it has {has}; the model has {wanted}")
    with errors_on_all_ranks():
        opened.read(found)
    opened.close()  # the other ranks of this machine have read the copies, too
    return result


def _check_shapes(where: Path, state: Mapping[str, Tensor], saved: Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError unless `saved`, the shapes in `where`, has every tensor of `state`."""
    if missing := sorted(set(state) - set(saved)):
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{where} has no {missing[0]}{more}: {_WHY_MISSING}")
    for name, tensor in state.items():
        if (shape := [*saved[name]]) != [*tensor.shape]:
            raise ValueError(f"{where}: {name} has shape {quoted(shape, 60)}, expected {[*tensor.shape]}")


def load_checkpoint(checkpoint: Path, state: Mapping[str, Tensor]) -> None:
    """Load into the tensors of `state` in place. Collective. Errors: as in `load_state`.

    Names are `kind.weight`, such as exp_avg.head.weight.
    """
    different = f"the ranks found different checkpoints at {checkpoint}: --resume needs a shared path"
    load_state(lambda: SavedModel(checkpoint, ""), state, different)


def load_weights(folder: Path, state: Mapping[str, Tensor], partial: bool = False) -> PartialLoad:
    """Load the weights in `state` in place, and read only these. Collective. Arguments and errors: as in `load_state`.

    folder: from `find_weights`. In `state`, the names of weights begin with "model.".
    """
    weights = {name.removeprefix(PREFIX): tensor for name, tensor in state.items() if name.startswith(PREFIX)}
    different = f"the ranks found different weights at {folder}: --weights needs a shared path, or equal copies"
    return load_state(lambda: open_weights(folder), weights, different, partial)


# ---- Models for inference ----


def open_model(
    path: str, own_layers: Mapping[str, OwnLayer] | None = None, device: Literal["auto", "cpu", "cuda"] = "cpu"
) -> tuple[TransformerStage, Tokenizer]:
    """Load a model with its tokenizer, on a device, for inference.

    path: the folder, or URL, of a run (its newest checkpoint is used), of a checkpoint, or of a published model in
    Hugging Face's format.
    own_layers: the model's own layers, as for `load_model`. device: cpu (in fp32), cuda (in bf16), or auto: cuda if
    there is a GPU.

    Raises ValueError for a folder without a model, for one that is broken, and for wrong `own_layers`.
    """
    chosen = torch.device(choose_device(device, count_gpus(), 1))
    folder, config = find_model(path, own_layers)
    dtype = torch.float32 if chosen.type == "cpu" else torch.bfloat16
    model = from_pretrained(folder, dtype) if is_published(folder) else load_model(folder, **(own_layers or {}))
    return model.to(chosen, dtype), start_tokenizer(folder, config.vocab_size)


def find_model(path: str, own_layers: Mapping[str, OwnLayer] | None = None) -> tuple[Path, ModelConfig]:
    """The folder or checkpoint with a model, and its options. Arguments and errors are those of `open_model`."""
    opened = open_weights(find_weights(path))
    return opened.where, opened.config_with(own_layers or {})


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
