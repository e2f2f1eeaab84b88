"""Build whole models, or the parts of one, with the weights of a checkpoint or of a published model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

from ..data import BYTES, TOKENIZER_FILE, Tokenizer, UnknownTokenizer, find_tokenizer
from ..expert_parallel import ExpertParallel
from ..messages import printable
from ..models import ModelConfig, MoE, TransformerStage, build_model
from ..models.expert_slots import names_by_expert
from ..runtime.launch import choose_device, count_gpus
from .huggingface.companions import stop_ids
from .huggingface.published import from_pretrained
from .load import find_weights, is_published, load_state, load_weights, open_weights, start_companions
from .weights import PREFIX, OwnLayer, SavedModel, global_weights


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
    tokenizer = start_tokenizer(folder, config.vocab_size)
    model = from_pretrained(folder, dtype) if is_published(folder) else load_model(folder, **(own_layers or {}))
    model.companions = model.companions or start_companions(folder)
    return model.to(chosen, dtype), tokenizer


def find_model(
    path: str, own_layers: Mapping[str, OwnLayer] | None = None, newest: int | None = None
) -> tuple[Path, ModelConfig]:  # fmt: skip
    """The folder or checkpoint with a model, and its options. Arguments and errors are those of `open_model`.

    newest: as in `find_checkpoint`.
    """
    opened = open_weights(find_weights(path, newest))
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
    model.companions = start_companions(folder)
    layers = {moe.layer: moe for moe in model.modules() if isinstance(moe, MoE)}
    if experts and experts.keys() != layers.keys():
        placed, have = (", ".join(map(str, sorted(found))) for found in (experts, layers))
        raise ValueError(f"{folder}: copies are placed for layers {placed}, but its model has experts in layers {have}")
    in_order = [*range(config.num_experts)]
    slots = names_by_expert([model], {layer: experts.get(layer, in_order) for layer in layers})
    names = {slot_name: name for slot_name, name, _ in slots}
    weights = [(PREFIX + names.get(name, name), tensor) for name, tensor in global_weights(model).items()]
    load_weights(folder, state := dict(weights))
    with torch.no_grad():
        for name, tensor in weights:  # of several copies of an expert on this rank, one has been loaded
            tensor.copy_(state[name])
    for layer, slots in experts.items():
        layers[layer].place(slots)
    return model


def start_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of the model in a folder or checkpoint. Unknown for a published model without tokenizer.json."""
    tokenizer = find_tokenizer(folder)
    if is_published(folder) and tokenizer is BYTES:
        tokenizer = UnknownTokenizer(vocab_size, printable(folder / TOKENIZER_FILE))
    if tokenizer is not BYTES:
        tokenizer.stop_ids = stop_ids(start_companions(folder))
    return tokenizer
