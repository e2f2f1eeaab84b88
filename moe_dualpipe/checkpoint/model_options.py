"""Read the model options of a checkpoint from run.json, without trusting them.

An option of the wrong type would fail somewhere inside the model, and a huge one would use all memory. A model cannot
have more parameters than its checkpoint has numbers, so its sizes are compared with those of the tensors first.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..messages import plural, quoted
from ..models import ModelConfig


def model_config(saved: Mapping[str, Any]) -> ModelConfig:
    """Return the saved model. An option that is missing has its default. Raises ValueError for invalid options."""
    for field in dataclasses.fields(ModelConfig):
        value, kind = saved.get(field.name, field.default), type(field.default)
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ValueError(f"{field.name} must be of type {kind.__name__}: got {quoted(value, 60)}")
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    if unknown := [name for name in saved if name not in known]:
        raise ValueError(f"unknown option {quoted(unknown[0], 60)}")
    return ModelConfig(**saved)


def check_sizes(model: ModelConfig, shapes: Sequence[Sequence[int]]) -> None:
    """Raise ValueError if the model has more layers or parameters than `shapes`, those of all its tensors."""
    layers = model.num_layers + model.mtp_layers
    if layers > len(shapes):
        raise ValueError(f"its model has {plural(layers, 'layer')}, but it has {plural(len(shapes), 'tensor')}")
    elements = sum(map(math.prod, shapes))
    dense = sum(map(model.is_dense, range(layers)))
    sparse = layers - dense
    widths = [model.vocab_size, dense * model.dense_size, sparse * model.num_experts, model.mtp_layers]
    if model.experts == "swiglu":
        widths.append(sparse * (model.num_experts + model.num_shared_experts) * model.expert_size)
    if model.attention == "mla":
        latents = model.q_rank + model.kv_rank + model.rope_dim + model.num_heads * model.value_dim
        widths += [layers * latents, -(-layers * model.kv_rank * model.num_heads * model.head_dim // model.hidden_size)]
    else:
        widths.append(layers * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim)
    if model.hidden_size * max(widths) > elements:
        raise ValueError(f"its model does not fit into the {elements:,} numbers of its tensors")
