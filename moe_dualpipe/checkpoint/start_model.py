"""Take the model of --resume or --weights, for runs whose options do not name a model."""

import dataclasses

from ..data import stores as storage
from ..models import ModelConfig
from ..models.config import BUILT_IN, options_field


def start_model(resume: str | None, weights: str | None) -> ModelConfig | None:
    """The model of a run, a checkpoint or a published model, without its custom layers, which options must name.

    Returns None without such a path, and if it cannot be read: then planning the run raises the error. Raises
    StorageError if a store cannot be read.
    """
    if not (resume or weights):
        return None
    from . import list_checkpoints, open_weights  # imports torch

    try:
        path = storage.local_path(resume or weights or "")
        path = [*list_checkpoints(path / "checkpoints"), *list_checkpoints(path), path][0]
        storage.open_folder(path)
        model = open_weights(path).config
    except storage.StorageError:
        raise
    except (ValueError, OSError):
        return None
    for field in model.own_layers:
        model = dataclasses.replace(model, **{field: BUILT_IN[field][0], options_field(field): ""})
    return model
