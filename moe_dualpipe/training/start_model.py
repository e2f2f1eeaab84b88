"""Take the model of --resume or --weights, for runs whose options do not name a model."""

import dataclasses
from contextlib import suppress
from pathlib import Path

from ..models import ModelConfig
from ..models.config import BUILT_IN, options_field


def start_model(resume: str | None, weights: str | None) -> ModelConfig | None:
    """The model of a checkpoint or of a folder of weights, without its custom layers, which options must name.

    Returns None without such a path, and if it cannot be read: planning the run then raises the error.
    """
    if not (resume or weights):
        return None
    from ..checkpoint import list_checkpoints, model_of, read_manifest  # imports torch
    from ..checkpoint.model_options import model_config

    with suppress(ValueError, OSError):
        if resume:
            run = Path(resume)
            found = [*list_checkpoints(run / "checkpoints"), *list_checkpoints(run), run]
            model = model_config(read_manifest(found[0]).model)
        else:
            model = model_of(Path(weights or ""))
        for field in model.own_layers:
            model = dataclasses.replace(model, **{field: BUILT_IN[field][0], options_field(field): ""})
        return model
    return None
