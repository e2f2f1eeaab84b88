"""Load the model and the tokenizer of a run, a checkpoint, an export, or a published model."""

from collections.abc import Mapping
from typing import Literal

import torch

from .. import storage
from ..data import Tokenizer, find_tokenizer
from ..messages import printable
from ..models import TransformerStage
from ..runtime.launch import choose_device, count_gpus
from .huggingface import from_pretrained
from .load import find_checkpoint
from .weights import CONFIG_FILE, OwnLayer, load_model
from .weights_folder import is_published, load_exported, start_tokenizer


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
    folder = storage.local_path(path)
    storage.open_folder(folder)
    exported = (folder / CONFIG_FILE).is_file()
    folder = folder if exported else find_checkpoint(path)
    dtype = torch.float32 if chosen.type == "cpu" else torch.bfloat16
    if exported and is_published(folder):
        if named := [field for field, layer in (own_layers or {}).items() if layer is not None]:
            raise ValueError(
                f"{printable(folder)} is a published model, without layers of your own: leave out --{named[0]}"
            )
        model = from_pretrained(folder, dtype).to(chosen)
        return model, start_tokenizer(folder, model.config.vocab_size)
    model = (load_exported if exported else load_model)(folder, **(own_layers or {}))
    return model.to(chosen, dtype), find_tokenizer(folder)
