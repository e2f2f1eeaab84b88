"""Low-rank adapters in the format of PEFT, for transformers 5: adapter_config.json and adapter_model.safetensors.

PEFT adapts modules (`target_modules`) and, where experts are stacked in one tensor, parameters (`target_parameters`).
It adapts such a tensor as one matrix: A of all experts are stacked, expert by expert, and the columns of B alternate
between experts, rank by rank. Other MLPs and routers are named as parameters, too: PEFT would take modules with names
like gate_proj for experts of an older transformers.

E experts, R rank, O output and I input width.
"""

import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path

import torch
from einops import rearrange
from torch import Tensor

from ...data.strict_json import read_named
from ...messages import check_range, printable, quoted
from ...models import ModelConfig
from ...models.config import LORA_TARGETS, LoRA
from ..destinations import ADAPTER_CONFIG_FILE
from ..tensor_file import read_entry, read_header
from ..weights import SavedModel, group_names
from .companions import companions_of
from .save import ExportPlan, layout_of
from .tensors import PublishedRows, TensorLayout

TENSOR_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_REFUSED = (
    "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias", "layer_replication",
    "trainable_token_indices", "fan_in_fan_out", "use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config",
    "kasa_config", "monteclora_config",
)  # fmt: skip
"""Keys of adapter_config.json that must have no effect."""
_INITS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the base as it is. Others, such as "pissa", subtract the first adapter."""


@dataclass(frozen=True, slots=True)
class AdapterKey:
    """Where PEFT stores a matrix of an adapter.

    name: of this model, such as "layers.0.attention.out.lora.B.0". key: of the tensor in the file. matrix: A or B.
    part: the published rows that it adapts. expert: which one of a stacked tensor; None: the tensor has no others.
    """

    name: str
    key: str
    matrix: str
    part: PublishedRows
    kind: str
    expert: int | None = None


def kind_of(weight: str) -> str:
    """Which of LORA_TARGETS a weight in a block belongs to, by its global name; "" for none."""
    _, _, part, *rest = weight.split(".")
    if part == "attention":
        return part
    inner = rest[0] if part == "mlp" else ""
    return inner if inner in LORA_TARGETS else "dense" if inner in ("gate_up", "down") else ""


def adapter_keys(layout: TensorLayout) -> Iterator[AdapterKey]:
    """All adapters that a model of this layout may have, in the order of its layers."""
    for target in layout.targets():
        kind = kind_of(target.name) if target.name.startswith("layers.") else ""
        if not kind or len(target.shape) < 2:
            continue
        parts = target.parts[:1] if target.expert else target.parts  # gate and up of experts have one adapter
        for (number, part), matrix in product(enumerate(parts), "AB"):
            module = part.name.replace(f".{layout.architecture.mlp}.", ".mlp.").removesuffix(".weight")
            name, expert = f"{target.name.removesuffix('.weight')}.lora.{matrix}.{number}", None
            if target.expert:
                prefix, weight, expert = target.name.rsplit(".", 2)
                name = f"{prefix}.lora.{weight}_{matrix}.{expert}"
                inner = ".base_layer" if weight == "gate_up" else ""  # PEFT wraps this parameter first
                module = f"{module.partition('.mlp.')[0]}.mlp.experts{inner}"
            key = f"{_PREFIX}{module}.lora_{matrix}.weight"
            yield AdapterKey(name, key, matrix, part, kind, None if expert is None else int(expert))


def _targets(keys: list[AdapterKey]) -> dict[str, list[str]]:
    """The entries of adapter_config.json that name what is adapted."""
    modules, parameters = dict[str, None](), dict[str, None]()
    for key in keys:
        module = key.key.removeprefix(f"{_PREFIX}model.layers.").partition(".")[2].partition(".lora_")[0]
        if key.kind == "attention":
            modules[module] = None
        elif key.kind == "experts":
            inner = module.endswith(".base_layer")
            parameters[f"{module.removesuffix('.base_layer')}.{'gate_up_proj' if inner else 'down_proj'}"] = None
        else:
            parameters[f"{module}.weight"] = None
    return {"target_modules": [*modules], "target_parameters": [*parameters]}


# ---- Write ----


@dataclass(frozen=True, slots=True)
class AdapterPlan(ExportPlan):
    """A planned export of the adapters of a checkpoint, in fp32. matrices: those of each tensor of the file."""

    matrices: Mapping[str, list[AdapterKey]] = field(default_factory=dict)
    config_file = ADAPTER_CONFIG_FILE

    def shards(self, max_shard_size: int | str = "") -> dict[str, list[str]]:
        """One file, of any size."""
        return {TENSOR_FILE: [*self.shapes]}

    def tensors(self, wanted: Set[str]) -> Iterator[tuple[str, Tensor]]:
        for name in filter(wanted.__contains__, self.shapes):
            key, stacked = self.matrices[name][0], [self.read(key.name).float() for key in self.matrices[name]]
            if key.expert is not None:
                pattern = "e r i -> (e r) i" if key.matrix == "A" else "e o r -> o (r e)"
                yield name, rearrange(torch.stack(stacked), pattern)
            else:
                yield name, stacked[0] if key.matrix == "A" else key.part.to_published(stacked[0])


def plan_adapter_export(checkpoint: Path) -> AdapterPlan:
    """Plan to write the adapters of a checkpoint. Raises ValueError if it has none, or if no published architecture can
    express its model."""
    saved = SavedModel(checkpoint)
    if saved.adapters is None:
        raise ValueError(f"{printable(checkpoint)} has no adapters: its run was trained without --lora")
    layout, lora = layout_of(saved.config, companions_of(checkpoint)), saved.adapters.lora
    keys, matrices = [key for key in adapter_keys(layout) if key.name in saved.adapter_names], {}
    for key in keys:
        matrices.setdefault(key.key, []).append(key)
    shapes = {}
    for name, (key, *others) in matrices.items():
        rows, columns = saved.adapter_shape(key.name)
        number = 1 + len(others)
        shapes[name] = torch.float32, (rows * number, columns) if key.matrix == "A" else (rows, columns * number)
    alpha = lora.scale * lora.rank
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": saved.adapters.base, "r": lora.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha, "lora_dropout": 0.0, "bias": "none",
        "fan_in_fan_out": False, "inference_mode": True, **_targets(keys),
    }  # fmt: skip
    return AdapterPlan(layout, torch.float32, saved.adapter, shapes, config, {}, matrices=matrices)


# ---- Read ----


class PeftAdapter:
    """An adapter in PEFT's format, for a model with this layout. lora: rank, scale and targets.

    Raises ValueError if a file is invalid, if the adapter has what this project lacks, or does not fit the model.
    """

    def __init__(self, folder: Path, model: ModelConfig, companions: Mapping[str, str]):
        self.where, self._num_experts = folder, model.num_experts
        config = read_named(folder / ADAPTER_CONFIG_FILE, dict)
        where = printable(folder / ADAPTER_CONFIG_FILE)
        wrong = next(
            filter(config.get, _REFUSED), "init_lora_weights" * (config.get("init_lora_weights") not in _INITS)
        )
        if config.get("peft_type") != "LORA" or wrong or config.get("bias", "none") != "none":
            given = f"{wrong} {quoted(config[wrong], 60)}" if wrong else "a bias, or another type than LORA"
            raise ValueError(f"{where}: {given} is not supported, only plain LoRA")
        rank, alpha = config.get("r"), config.get("lora_alpha")
        if type(rank) is not int or type(alpha) not in (int, float):
            raise ValueError(f"{where}: r and lora_alpha must be numbers: got {quoted(rank, 60)}, {quoted(alpha, 60)}")
        check_range("r", rank, 1)
        scaled = alpha * math.sqrt(rank) if config.get("use_rslora") else alpha
        self._entries = read_header(folder / TENSOR_FILE)
        keys = [*adapter_keys(layout_of(model, companions))]
        if unknown := {*self._entries} - {key.key for key in keys}:
            raise ValueError(
                f"{printable(folder / TENSOR_FILE)} adapts what this model does not have, or was written for an older "
                f"transformers: {group_names(unknown)}"
            )
        pairs = Counter(key.replace(".lora_B.", ".lora_A.") for key in self._entries)
        if halves := [key for key, number in pairs.items() if number == 1]:
            raise ValueError(f"{printable(folder / TENSOR_FILE)} has only one of A and B: {group_names(halves)}")
        self._keys = {key.name: key for key in keys if key.key in self._entries}
        kinds = {key.kind for key in self._keys.values()}
        self.lora = LoRA(rank, float(scaled), targets=tuple(kind for kind in LORA_TARGETS if kind in kinds))

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the matrices, by their global names in this model."""
        stored = {key: torch.empty(entry.shape, device="meta") for key, entry in self._entries.items()}
        return {name: tuple(self._matrix(key, stored[key.key]).shape) for name, key in self._keys.items()}

    @property
    def checksum(self) -> int:
        """Tells adapters apart by their headers, but not by their numbers."""
        described = [(name, entry.shape, entry.start) for name, entry in sorted(self._entries.items())]
        return zlib.crc32(repr(described).encode())

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        of_key: dict[str, list[str]] = {}
        for name in tensors:
            of_key.setdefault(self._keys[name].key, []).append(name)
        for key, names in of_key.items():
            stored = read_entry(self._entries[key])  # may have the matrices of all experts
            for name in names:
                tensors[name].copy_(self._matrix(self._keys[name], stored))

    def _matrix(self, key: AdapterKey, stored: Tensor) -> Tensor:
        """A matrix of this model in a tensor of the file. Raises ValueError if its shape does not fit the rank."""
        rank, dim = self.lora.rank, 0 if key.matrix == "A" else 1
        if stored.ndim != 2 or stored.shape[dim] % rank or (key.expert is None and stored.shape[dim] != rank):
            got = f"{key.key} has shape {[*stored.shape]}"
            raise ValueError(f"{printable(self.where)}: {got}, which does not fit r {rank}")
        if key.expert is None:
            return stored if key.matrix == "A" or stored.is_meta else key.part.from_published(stored)
        experts = stored.shape[dim] // rank
        if experts != self._num_experts:
            raise ValueError(f"{printable(self.where)}: {key.key} has {experts} experts")
        if key.matrix == "A":
            return rearrange(stored, "(e r) i -> e r i", r=rank)[key.expert]
        return rearrange(stored, "o (r e) -> e o r", r=rank)[key.expert]
