"""Read the model options of a checkpoint from run.json, without trusting them.

An option of the wrong type would fail somewhere inside the model, and a huge one would use all memory. A model cannot
have more parameters than its checkpoint has numbers, so its sizes are compared with those of the tensors first.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..messages import plural, printable, quoted
from ..models import ModelConfig
from ..models.config import BUILT_IN
from ..models.costs import shape_of
from ..models.layer_class import Factory, name_of, same_layer


def model_config(saved: Mapping[str, Any]) -> ModelConfig:
    """Return the saved model. An option that is missing has its default. Raises ValueError for invalid options."""
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    if unknown := [name for name in saved if name not in known]:
        raise ValueError(f"unknown option {quoted(unknown[0], 60)}")
    saved = {key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()}
    check_types(saved)
    return ModelConfig(**saved)


def check_types(options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option of `ModelConfig` with a value of another type."""
    for field in dataclasses.fields(ModelConfig):
        value, kind = options.get(field.name, field.default), type(field.default)
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ValueError(f"{field.name} must be of type {kind.__name__}: got {quoted(value, 60)}")
        if isinstance(value, tuple) and any(type(entry) is not int for entry in value):
            raise ValueError(f"{field.name} must be a list of whole numbers: got {quoted([*value], 60)}")


def with_named_layers(model: ModelConfig, named: Mapping[str, str | Factory | None], where: str) -> ModelConfig:
    """Return the model of the checkpoint `where`, with the custom layers that the user has named.

    named: "experts", "router", "attention" or "block" -> a name or class, or None for built-in layers. A checkpoint
    never decides what is imported. Raises ValueError if it has other layers than these.
    """
    for field, given in named.items():
        saved, name = getattr(model, field), name_of(given) if given is not None else None
        if name is None and saved in BUILT_IN[field]:
            continue
        if name is None:
            advice = f"if you trust this code, use --{field} {printable(saved)}, or its new name if it has moved"
            raise ValueError(f"{where} has custom {field}, {quoted(saved)}: {advice}")
        if not same_layer(saved, name):
            advice = f"use --{field} {printable(saved)} if you trust this code"
            advice = f"leave out --{field}" if saved in BUILT_IN[field] else advice
            raise ValueError(f"{where} has {field} {quoted(saved)}, not {quoted(name)}: {advice}")
        model = dataclasses.replace(model, **{field: name})
    return model


def check_sizes(model: ModelConfig, shapes: Sequence[Sequence[int]], where: str) -> None:
    """Raise ValueError if the model has more layers or experts, or many more parameters, than `shapes`, of all tensors.

    Even listing the tensors of a huge model takes long. Of custom layers, only the user's code knows the sizes.
    """
    elements, layers = sum(map(math.prod, shapes)), model.num_layers + model.mtp_layers
    fits = layers <= len(shapes)
    if fits and not model.own_layers:
        experts = len(model.routed_blocks()) * model.num_experts
        fits = experts <= len(shapes) and shape_of(model).parameters <= 2 * elements
    if not fits or model.hidden_size * model.vocab_size > 2 * elements:
        parts = (
            f"{plural(layers, 'layer')} of {plural(model.num_experts, 'expert')} and {plural(model.num_heads, 'head')}"
        )
        raise ValueError(
            f"cannot build the model of {where}: its {parts} do not fit into the {elements:,} numbers of its tensors"
        )
