"""The folder of a published model: read any tensor of this model from it.

The whole folder is checked before the first tensor is read: it must have every tensor of the model, with the right
shape, and no others. So experts are never dropped silently.
"""

import dataclasses
import math
import zlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...data.strict_json import read_named
from ...messages import plural, printable, quoted
from ...models import ModelConfig
from ...models.costs import shape_of
from ..partial import group_names
from ..tensor_file import TensorEntry
from ..tensor_folder import TensorFolder
from .architectures import Architecture
from .config import architecture_of, differences, is_interleaved, read_config
from .fp8 import BLOCK, dequantize
from .tensors import EMBEDDING, HEAD, Layout, Target, published_shapes

CONFIG_FILE = "config.json"
_SCALE = "_scale_inv"
_DERIVED = ".rotary_emb.inv_freq"  # tables of angles, which old versions of transformers saved
_PIECE = 2**24  # numbers that are compared at a time


class PublishedModel:
    """A folder with config.json and safetensors files, in the format of transformers, vLLM and SGLang.

    config: the model. architecture: its entry in the table of architectures. source: the contents of config.json.
    dtype: of the weights; bfloat16 for weights in fp8, which are expanded.

    Raises ValueError, in one line, if a file is invalid, if the model is not supported, and if the tensors do not fit
    the model: the message lists what is missing and what is left over.
    """

    def __init__(self, folder: Path):
        self.folder = self.where = folder
        self.source = read_config_file(folder)
        try:
            self.architecture: Architecture = architecture_of(self.source)
            config = read_config(self.source)
            self._fp8 = _is_fp8(self.source.get("quantization_config"))
        except ValueError as error:
            raise ValueError(f"{printable(folder / CONFIG_FILE)}: {error}") from None
        self._tensors = TensorFolder(folder)
        self._check_counts(config)
        self.layout = self._layout(config)
        self.config: ModelConfig = self.layout.model
        self._check()
        stored = self._tensors.entries[EMBEDDING].dtype
        self.dtype = stored if stored.itemsize > 1 else torch.bfloat16

    @cached_property
    def targets(self) -> Mapping[str, Target]:
        """The tensors of the model that the folder has, by global name."""
        return {target.name: target for target in self.layout.targets()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of the model, by global name."""
        return {name: target.shape for name, target in self.targets.items()}

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that were read so far."""
        return self._tensors.bytes_read

    @property
    def checksum(self) -> int:
        """A checksum of config.json and of all headers, but not of the weights. Tells folders apart."""
        described = [(name, str(e.dtype), e.shape, e.start) for name, e in sorted(self._tensors.entries.items())]
        return zlib.crc32(repr((sorted(self.source.items()), described)).encode())

    @torch.no_grad()
    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Read weights of the model, by global name, into tensors of the same shapes.

        Raises ValueError unless copies of a published tensor are equal to it. The rank that loads the embedding
        compares a tied head with it, and the rank that loads the projection of an MTP module the copies in that module.
        """
        for name, tensor in tensors.items():
            first = 0
            for part in self.targets[name].parts:
                published = self._read(part.name, tensor.dtype, part.index)
                tensor[first : first + part.shape[0]].copy_(part.from_published(published))
                first += part.shape[0]
        users = {f"model.layers.{layer}.": f"mtp.{k}.join.weight" for k, layer in enumerate(self.config.mtp_blocks)}
        for name, original in self._copies.items():
            user = next((user for prefix, user in users.items() if name.startswith(prefix)), "embedding.weight")
            if user in tensors and not self._equal(name, original):
                raise ValueError(
                    f"{printable(self.folder)}: {name} differs from {original}, but this model has one tensor for both"
                )

    def differences(self, model: ModelConfig) -> list[str]:
        """The options in which `model` differs from that of the folder. Its MTP modules may be left out."""
        return [
            f"{name} was {quoted(published, 60)}, now {now!r}"
            for name, published, now in differences(self.config, model)
            if name != "mtp_layers" or now
        ]

    def _layout(self, config: ModelConfig) -> Layout:
        """The layout of this folder, without MTP if its tensors are missing: transformers does not write them."""
        names = self._tensors.entries.keys()
        if config.mtp_blocks and f"model.layers.{config.num_layers}.eh_proj.weight" not in names:
            config = dataclasses.replace(config, mtp_layers=0)
        stacked = any(name.endswith(".mlp.experts.gate_up_proj") for name in names)
        interleaved = self.architecture.interleaved and is_interleaved(self.source)
        return Layout(config, self.architecture, stacked, interleaved)

    def _check_counts(self, config: ModelConfig) -> None:
        """Raise ValueError for a model much larger than the folder: only listing its tensors could take long."""
        entries = self._tensors.entries
        stacked = sum(entry.shape[0] for entry in entries.values() if len(entry.shape) == 3)
        experts = len(config.routed_blocks()) * config.num_experts
        elements = sum(math.prod(entry.shape) for entry in entries.values())
        if experts > 2 * (len(entries) + stacked) or shape_of(config).parameters > 2 * elements:
            raise ValueError(
                f"{printable(self.folder)}: its config.json describes {plural(config.num_layers, 'layer')} of "
                f"{plural(config.num_experts, 'expert')} and {plural(config.num_heads, 'head')}, far more than "
                f"{elements:,} numbers in {plural(len(entries), 'tensor')} can hold"
            )

    def _check(self) -> None:
        """Raise ValueError unless the tensors of the folder are those of the model."""
        entries, where = self._tensors.entries, printable(self.folder)
        shapes = published_shapes(self.layout)
        if missing := shapes.keys() - entries.keys():
            raise ValueError(
                f"{where} lacks tensors of the model that its config.json describes: {group_names(missing)}"
            )
        known = shapes | {name: shapes[original] for name, original in self._copies.items()}
        known |= {name: shape for name, shape in self.layout.unused().items() if name in entries}
        scales = set()
        for name, shape in known.items():
            found, what = entries[name], f"{where}: {printable(name, 100)}"
            if found.shape != shape:
                raise ValueError(f"{what} has shape {[*found.shape]}, but by config.json it must have {[*shape]}")
            fp8 = found.dtype.itemsize == 1 and found.dtype.is_floating_point
            if not found.dtype.is_floating_point or (fp8 and len(shape) == 1):
                kind = "vectors" if fp8 else "weights"
                raise ValueError(f"{what} has dtype {found.dtype}, which is not for {kind}")
            if fp8:
                scales.add(self._check_fp8(name, found, what))
        if extra := {name for name in entries.keys() - known.keys() - scales if not name.endswith(_DERIVED)}:
            raise ValueError(
                f"{where} has tensors that the model of its config.json does not have: {group_names(extra)}"
            )

    def _check_fp8(self, name: str, found: TensorEntry, what: str) -> str:
        """Return the name of the scales of a weight in fp8. Raises ValueError if they do not fit it."""
        if found.dtype != torch.float8_e4m3fn:
            raise ValueError(f"{what} has dtype {found.dtype}, which is not supported: only {torch.float8_e4m3fn}")
        if not self._fp8:
            raise ValueError(
                f"{what} has dtype {found.dtype}, which needs a quantization_config of 'fp8' in config.json"
            )
        shape = *found.shape[:-2], *(-(-size // BLOCK) for size in found.shape[-2:])  # stacked experts have their own
        scale = self._tensors.entries.get(f"{name}{_SCALE}")
        if scale is None or (scale.shape, scale.dtype) != (shape, torch.float32):
            raise ValueError(f"{what}{_SCALE} must be float32 {[*shape]}, one scale for each block")
        return f"{name}{_SCALE}"

    @property
    def _copies(self) -> dict[str, str]:
        """The tensors of the folder that are copies: name of the copy -> name of the original."""
        tied = {HEAD: EMBEDDING} if self.config.tied_embeddings else {}
        return {name: one for name, one in {**tied, **self.layout.copies()}.items() if name in self._tensors.entries}

    def _read(self, name: str, dtype: torch.dtype, index: int | None = None) -> Tensor:
        """A published tensor, or one entry of it, in its stored dtype; fp8 is expanded into `dtype`."""
        tensor = self._tensors.read(name, index)
        if tensor.dtype.itemsize > 1:
            return tensor
        return dequantize(tensor, self._tensors.read(f"{name}{_SCALE}", index), dtype)

    def _equal(self, name: str, original: str) -> bool:
        first, second = (self._read(one, torch.float32).flatten() for one in (name, original))
        return all(map(torch.equal, first.split(_PIECE), second.split(_PIECE)))


def read_config_file(folder: Path) -> dict[str, Any]:
    """The contents of config.json. Raises ValueError if it cannot be read or is not an object."""
    path = folder / CONFIG_FILE
    if not path.exists():
        raise ValueError(
            f"{printable(folder)} has no {CONFIG_FILE}: give the local folder of a published model (hf download)"
        )
    config = read_named(path)
    if not isinstance(config, dict):
        raise ValueError(f"{printable(path)} must be an object: got {quoted(config, 60)}")
    return config


def _is_fp8(quantization: Any) -> bool:
    """Whether matrices are in fp8, as DeepSeek publishes them. Raises ValueError for other quantizations."""
    if quantization is None:
        return False
    if not isinstance(quantization, Mapping):
        raise ValueError(f"quantization_config must be an object: got {quoted(quantization, 60)}")
    for key, wanted in {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}.items():
        if (value := quantization.get(key, "e4m3")) != wanted:
            raise ValueError(f"quantization_config with {key} {quoted(value, 60)} is not supported: only {wanted!r}")
    return True
