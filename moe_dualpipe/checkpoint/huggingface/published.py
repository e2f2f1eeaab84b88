"""The folder of a published model: read any tensor of this model from it, or build the model.

The whole folder is checked before the first tensor is read: it must have every tensor of the model, with the right
shape, and no others. So experts are never dropped silently.
"""

import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...data.strict_json import read_named
from ...expert_parallel import ExpertParallel
from ...kernels.fp8 import Fp8Matrix
from ...messages import printable, quoted
from ...models import ModelConfig, StageOptions, TransformerStage, build_model
from ..destinations import CONFIG_FILE
from ..tensor_file import TensorEntry, TensorFolder
from ..weights import OwnLayer, check_sizes, global_weights, group_names, with_named_layers
from .architectures import Architecture
from .companions import BLOCK, read_companions
from .config import architecture_of, is_interleaved, read_config
from .tensors import EMBEDDING, HEAD, Target, TensorLayout, published_shapes

_DERIVED = ".rotary_emb.inv_freq"  # tables of angles, which old versions of transformers saved
_OURS = {EMBEDDING: "embedding.weight", HEAD: "head.weight"}
_PIECE = 2**24  # numbers that are compared at a time
SCALE = "_scale_inv"
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}


class PublishedModel:
    """A folder with config.json and safetensors files, in the format of transformers, vLLM and SGLang.

    config: the model. architecture: its entry in the table of architectures. source: the contents of config.json.
    dtype: of the weights; bfloat16 for weights in fp8, which are expanded.

    Raises ValueError, in one line, if a file is invalid, if the model is not supported, and if the tensors do not fit
    the model: the message lists missing and unexpected tensors.
    """

    def __init__(self, folder: Path):
        self.folder = self.where = folder
        if not (folder / CONFIG_FILE).exists():
            raise ValueError(
                f"{printable(folder)} has no {CONFIG_FILE}: give the local folder of a published model (hf download)"
            )
        self.source = read_named(folder / CONFIG_FILE, dict[str, Any])
        try:
            self.architecture: Architecture = architecture_of(self.source)
            config = read_config(self.source)
            self._fp8 = _is_fp8(self.source.get("quantization_config"))
        except ValueError as error:
            raise ValueError(f"{printable(folder / CONFIG_FILE)}: {error}") from None
        self._tensors = TensorFolder(folder)
        self._tensors.entries = unstacked(self._tensors.entries, self.architecture, config.num_experts)
        self.layout = self._layout(config)
        self.config: ModelConfig = self.layout.model
        check_sizes(self.config, [entry.shape for entry in self._tensors.entries.values()], printable(folder))
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

    def config_with(self, named: Mapping[str, OwnLayer]) -> ModelConfig:
        """The model. Raises ValueError if custom layers are named: it has none."""
        return with_named_layers(self.config, named, printable(self.folder))

    @property
    def checksum(self) -> int:
        """A checksum of config.json and of all headers, but not of the weights. Tells folders apart."""
        described = [(name, str(e.dtype), e.shape, e.start) for name, e in sorted(self._tensors.entries.items())]
        return zlib.crc32(repr((sorted(self.source.items()), described)).encode())

    @torch.no_grad()
    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Read weights of the model, by global name, into tensors of the same shapes.

        Raises ValueError unless copies of a published tensor, such as a tied head, are equal to it. The rank that loads
        the tensor compares them.
        """
        for name, tensor in tensors.items():
            target = self.targets[name]
            for part, rows in zip(target.parts, tensor.split(target.heights), strict=True):
                rows.copy_(part.from_published(self._read(part.name, tensor.dtype)))
        for name, original in self._copies.items():
            if _OURS[original] in tensors:
                self._compare(name, original)

    def _compare(self, name: str, original: str) -> None:
        first, second = (self._read(one, torch.float32).flatten() for one in (name, original))
        if not all(map(torch.equal, first.split(_PIECE), second.split(_PIECE))):
            raise ValueError(
                f"{printable(self.folder)}: {name} differs from {original}, but this model has one tensor for both"
            )

    def _layout(self, config: ModelConfig) -> TensorLayout:
        """The layout of this folder, without MTP if its tensors are missing: transformers does not write them."""
        names = self._tensors.entries.keys()
        if config.mtp_blocks and f"model.layers.{config.num_layers}.eh_proj.weight" not in names:
            config = replace(config, mtp_layers=0)
        interleaved = self.architecture.interleaved and is_interleaved(self.source)
        return TensorLayout(config, self.architecture, interleaved)

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
        matrices = [name for name in known if self._fp8 and entries[name].dtype == torch.float8_e4m3fn]
        scales = {f"{name}{SCALE}" for name in matrices if len(known[name]) == 2}
        if missing := scales - entries.keys():
            raise ValueError(f"{where} lacks scales of matrices in fp8: {group_names(missing)}")
        for name, shape in known.items():
            found, what = entries[name], f"{where}: {printable(name, 100)}"
            if found.shape != shape:
                raise ValueError(f"{what} has shape {[*found.shape]}, but by config.json it must have {[*shape]}")
            if (scale := f"{name}{SCALE}") in scales:
                stored, blocks = entries[scale], blocks_of(shape)
                if stored.shape != blocks or stored.dtype not in SCALE_DTYPES:
                    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in SCALE_DTYPES)
                    raise ValueError(f"{what}{SCALE} must be {[*blocks]}, one scale for each block, of {dtypes}")
            elif not found.dtype.is_floating_point or found.dtype.itemsize == 1:
                raise ValueError(
                    f"{what} has dtype {found.dtype}, which is not supported: only matrices may be float8_e4m3fn, with "
                    "a quantization_config of 'fp8' in config.json"
                )
        if extra := {name for name in entries.keys() - known.keys() - scales if not name.endswith(_DERIVED)}:
            raise ValueError(
                f"{where} has tensors that the model of its config.json does not have: {group_names(extra)}"
            )

    @property
    def _copies(self) -> dict[str, str]:
        """The tensors of the folder that are copies: name of the copy -> name of the original."""
        tied = {HEAD: EMBEDDING} if self.config.tied_embeddings else {}
        return {name: one for name, one in {**tied, **self.layout.copies()}.items() if name in self._tensors.entries}

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        """A published tensor in its stored dtype; fp8 is expanded into `dtype`.

        Despite the name of the scales, `weight_scale_inv`, a weight is the product of its number and its scale.
        """
        tensor = self._tensors.read(name)
        if tensor.dtype.itemsize > 1:
            return tensor
        return Fp8Matrix(tensor, self._tensors.read(f"{name}{SCALE}").float(), BLOCK, BLOCK).read(dtype)


def unstacked(entries: Mapping[str, TensorEntry], architecture: Architecture, experts: int) -> dict[str, TensorEntry]:
    """The tensors of a folder by their published names. transformers 5 can also save those of all experts as one.

    Names are then those of its modules. The rows of a matrix are consecutive bytes: each gets an entry of its own.
    """
    gate, up, down = architecture.matrices
    stacks = {"gate_up_proj": (gate, up), "down_proj": (down,)}
    found = dict[str, TensorEntry]()
    for name, entry in entries.items():
        layer, inside, part = name.partition(".mlp.")
        matrices, prefix = stacks.get(part.removeprefix("experts.")), f"{layer}.{architecture.mlp}."
        if matrices is None or len(entry.shape) != 3 or entry.shape[0] != experts or not entry.nbytes:
            found[f"{prefix}{part}" if inside else name] = entry
            continue
        shape = entry.shape[1] // len(matrices), entry.shape[2]
        for i in range(experts * len(matrices)):
            at = f"{prefix}experts.{i // len(matrices)}.{matrices[i % len(matrices)]}.weight"
            found[at] = replace(entry, shape=shape, start=entry.start + i * math.prod(shape) * entry.dtype.itemsize)
    return found


def blocks_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a weight."""
    return tuple(-(-size // BLOCK) for size in shape)


def _is_fp8(quantization: Any) -> bool:
    """Whether matrices are in fp8, as DeepSeek publishes them. Raises ValueError for other quantizations."""
    if quantization is None:
        return False
    given = {"fmt": "e4m3", **quantization} if isinstance(quantization, Mapping) else {}
    if any(given.get(key) != value for key, value in FP8.items()):
        raise ValueError(f"quantization_config {quoted(quantization, 200)} is not supported: it needs {FP8}")
    return True


def from_pretrained(
    folder: str | os.PathLike[str], dtype: torch.dtype | None = None, expert_parallel: ExpertParallel | None = None,
    options: StageOptions | None = None,
) -> TransformerStage:  # fmt: skip
    """Build the model in `folder`, which has config.json and safetensors files as transformers writes them.

    dtype: of the model; None: that of the stored weights. expert_parallel, options: as in `build_model`.

    Needs memory for the model and one more tensor. The model is on the CPU. `model.companions` has the texts of
    tokenizer.json, tokenizer_config.json and similar files, which `save_pretrained` writes again.

    Raises ValueError, in one line, for an architecture that is not supported, and for files that are invalid or do not
    fit together (docs/checkpoints.md).
    """
    published = PublishedModel(Path(folder))
    companions = read_companions(published.folder, tokenizer=True)
    options = options or StageOptions()
    with torch.device("meta"):  # no memory, and no random numbers
        model = build_model(published.config, expert_parallel, replace(options, lora=None))
    model = model.to(dtype or published.dtype).to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.zero_()  # buffers that are not loaded start from 0
    weights = global_weights(model)
    published.read(weights)
    model.companions = companions
    if options.lora is not None:
        model.add_adapters(options.lora)
    return model.to(dtype or published.dtype)
