"""The weights of a model by global name: of a module, in a checkpoint, or given in memory."""

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..data.strict_json import read_if_there
from ..expert_parallel.parameters import expert_ids, global_tensors
from ..messages import check_range, plural, printable, quoted
from ..models import ModelConfig
from ..models.config import BUILT_IN, LoRA, options_field
from ..models.costs import shape_of
from ..models.custom_layers import Factory, name_of, same_layer
from ..models.lora import adapted_weight, low_rank_update
from .manifest import read_manifest
from .tensor_file import TensorFolder

OwnLayer = str | Factory | None
"""A layer by its name, a class, or a function; None: built in."""
PREFIX = "model."  # a checkpoint puts it before the names of weights
_MAX_GROUPS = 20


@dataclasses.dataclass(frozen=True, slots=True)
class PartialLoad:
    """Names of tensors. loaded: in the model and the file. missing: only in the model. ignored: only in the file."""

    loaded: Sequence[str]
    missing: Sequence[str]
    ignored: Sequence[str]

    def __str__(self) -> str:
        missing, ignored = group_names(self.missing), group_names(self.ignored)
        lines = (
            f"loaded {plural(len(self.loaded), 'tensor')}",
            missing and f"not in the file, start from their initial weights: {missing}",
            ignored and f"in the file, but not in the model: {ignored}",
        )
        return "\n".join(filter(None, lines))


def group_names(names: Iterable[str]) -> str:
    """List one name of each group, and the size of the group. Names in a group differ only in numbers.

    Example: norm.weight, layers.0.up.2, layers.0.up.3, layers.2.up.2
    -> "layers.0.up.2 (and 2 like it), norm.weight"
    """
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    texts = [
        printable(group[0]) + (f" (and {len(group) - 1:,} like it)" if len(group) > 1 else "")
        for group in groups.values()
    ]
    more = [f"and {plural(len(texts) - _MAX_GROUPS, 'more group')}"] if len(texts) > _MAX_GROUPS else []
    return ", ".join(texts[:_MAX_GROUPS] + more)


# ---- Low-rank adapters (models/lora.py) ----
#
# lora.json says rank, scale and targets. The matrices are tensors like all others, so a resumed run finds them by their
# names. Whoever reads the model gets merged weights, W + scale * B A: generation, evaluation, exports and new runs need
# to know nothing of adapters.


LORA_FILE = "lora.json"
Pairs = Mapping[str, list[tuple[str, str]]]
"""The adapters of each adapted weight, by its global name: the names of A and B of each of its matrices."""


@dataclasses.dataclass(frozen=True, slots=True)
class SavedAdapters:
    """The contents of lora.json. base: the --weights from which the run started."""

    lora: LoRA
    base: str | None = None

    def file(self) -> dict[str, bytes]:
        """The file for a checkpoint: name -> content."""
        return {LORA_FILE: json.dumps(dataclasses.asdict(self), indent=2).encode()}


def saved_adapters(checkpoint: Path) -> SavedAdapters | None:
    """The description of the adapters in a checkpoint; None if it has none. Raises ValueError for an invalid one."""
    saved = read_if_there(checkpoint / LORA_FILE, SavedAdapters)
    if saved is not None:
        check_range(f"{printable(checkpoint / LORA_FILE)}: rank", saved.lora.rank, 1)
    return saved


def adapter_pairs(names: Iterable[str]) -> Pairs:
    """The adapters among the tensors with these global names. Raises ValueError for half of a pair."""
    found: dict[str, dict[tuple[int, str], str]] = {}
    for name in names:
        if adapted := adapted_weight(name):
            weight, matrix, number = adapted
            found.setdefault(weight, {})[number, matrix] = name
    pairs = {}
    for weight, matrices in found.items():
        wanted = [(number, matrix) for number in range(len(matrices) // 2) for matrix in "AB"]
        if sorted(matrices) != wanted:
            raise ValueError(f"the adapters of {printable(weight)} are incomplete")
        pairs[weight] = [(matrices[number, "A"], matrices[number, "B"]) for number, _ in wanted[::2]]
    return pairs


# ---- Of a checkpoint ----


class SavedModel:
    """The model and the tensors of a checkpoint. prefix: of the names of the tensors to read; `shapes` leaves it out.

    With the default prefix, the weights of a run with adapters are merged with them. With "", all tensors are read as
    they are stored. update_norms: of what was added to each weight that was read.

    where: the path in messages. checksum: differs for checkpoints with different tensors. Raises ValueError if run.json
    or lora.json cannot be read.
    """

    def __init__(self, folder: Path, prefix: str = PREFIX):
        self.where, self._prefix, self._manifest = folder, prefix, read_manifest(folder)
        self.step, self.checksum = self._manifest.step, self._manifest.checksum
        self.adapters = saved_adapters(folder)
        self.update_norms: dict[str, float] = {}

    @cached_property
    def _tensors(self) -> TensorFolder:
        return TensorFolder(self.where, self._manifest)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        entries, prefix = self._tensors.entries.items(), self._prefix
        found = {name.removeprefix(prefix): entry.shape for name, entry in entries if name.startswith(prefix)}
        return {name: shape for name, shape in found.items() if name not in self.adapter_names}

    @cached_property
    def pairs(self) -> Pairs:
        """The adapters to merge into each weight, by name."""
        names = (name.removeprefix(PREFIX) for name in self._tensors.entries if name.startswith(PREFIX))
        return adapter_pairs(names) if self.adapters and self._prefix else {}

    @cached_property
    def adapter_names(self) -> set[str]:
        """The matrices of all adapters, by global name."""
        return {name for pairs in self.pairs.values() for pair in pairs for name in pair}

    @property
    def config(self) -> ModelConfig:
        """The model. Reads no weights. Raises ValueError if its options are invalid."""
        try:
            return model_config(self._manifest.model)
        except ValueError as error:
            raise ValueError(f"cannot build the model of {printable(self.where)}: {printable(error)}") from None

    def config_with(self, named: Mapping[str, OwnLayer]) -> ModelConfig:
        """The model with its custom layers, which must be named: a checkpoint never decides which class is imported.

        named: "experts", "router", "attention", "block". Raises ValueError if the model has other layers, or if it has
        more parameters than the checkpoint.
        """
        config = self.config
        check_sizes(config, [*self.shapes.values()], printable(self.where))
        return with_named_layers(config, named, str(self.where))

    def tensor(self, name: str) -> Tensor:
        weight = self._tensors.read(self._prefix + name)
        if name not in self.pairs:
            return weight
        pairs, update = [(self.adapter(a), self.adapter(b)) for a, b in self.pairs[name]], None
        assert self.adapters
        if all(a.ndim == b.ndim == 2 and len(a) == b.shape[1] for a, b in pairs):
            update = low_rank_update(pairs, self.adapters.lora.scale)
        if update is None or update.shape != weight.shape:
            raise ValueError(f"{printable(self.where)}: the adapters of {printable(name)} do not fit its shape")
        self.update_norms[name] = update.norm().item()
        return weight + update

    def adapter(self, name: str) -> Tensor:
        """A matrix of an adapter, by its global name."""
        return self._tensors.read(PREFIX + name)

    def adapter_shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.entries[PREFIX + name].shape

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Read into tensors of the same shapes. Raises ValueError if they cannot be read."""
        for name, tensor in tensors.items():
            tensor.copy_(self.tensor(name))


def global_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a whole model by global name, as views."""
    ids = expert_ids(model)
    return {
        global_name: view
        for name, tensor in model.state_dict().items()
        for global_name, view in global_tensors(name, tensor, ids.get(name))
    }


# ---- Model options, which are not trusted ----
#
# An option of the wrong type would fail somewhere inside the model, and a huge one would use all memory. A model cannot
# have more parameters than its checkpoint has numbers, so its sizes are compared with those of the tensors first.


def model_config(saved: Mapping[str, Any]) -> ModelConfig:
    """Return the saved model. An option that is missing has its default. Raises ValueError for invalid options."""
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    if unknown := [name for name in saved if name not in known]:
        raise ValueError(f"unknown option {quoted(unknown[0], 60)}")
    for name in map(options_field, BUILT_IN):
        if not isinstance(given := saved.get(name, ""), str):  # only programs give options as objects
            raise ValueError(f"{name} must be text: got {quoted(given, 60)}")
    return ModelConfig(**saved)


def with_named_layers(model: ModelConfig, named: Mapping[str, str | Factory | None], where: str) -> ModelConfig:
    """Return the model of the checkpoint `where`, with the custom layers that the user has named.

    named: "experts", "router", "attention" or "block" -> a name or class, or None for built-in layers. A checkpoint
    never decides what is imported. Raises ValueError if it has other layers than these.
    """
    for field, given in named.items():
        saved, name = getattr(model, field), name_of(given) if given is not None else None
        if name is None and saved in BUILT_IN[field]:
            continue
        if name is None or not same_layer(saved, name):
            built_in = saved in BUILT_IN[field]
            advice = f"leave out --{field}" if built_in else f"if you trust this code, use --{field} {printable(saved)}"
            other = "" if name is None else f", not {quoted(name)}"
            raise ValueError(f"{where} has {'' if built_in else 'custom '}{field} {quoted(saved)}{other}: {advice}")
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
