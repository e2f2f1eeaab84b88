"""Write a model, or a checkpoint of any parallel layout, in the format that transformers, vLLM and SGLang read.

    model.safetensors                                       if all tensors fit into one file
    model-00001-of-00003.safetensors, ...                   otherwise, divided as transformers does
    model.safetensors.index.json                            which file has which tensor

Names, dtypes and shapes are known before the first tensor, so files and index are planned first. Tensors are written
one file at a time, in the order of the layers: the memory needed is that of a file and three times the largest tensor
in fp32, for a model of any size. Ranks divide the files among themselves. The folder gets its name when all of its
files are on disk.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...data import Tokenizer, find_tokenizer
from ...data.files import divide
from ...data.strict_json import parse_one
from ...expert_parallel.gather import gather_objects
from ...kernels.fp8 import DTYPE as FP8_DTYPE
from ...kernels.fp8 import Fp8Recipe
from ...messages import printable, quoted
from ...models import ModelConfig, TransformerStage
from ..destinations import CONFIG_FILE, write_folder
from ..tensor_file import INDEX_FILE, SINGLE_FILE, write_tensors
from ..weights import SavedModel, global_weights
from .architectures import ALIASES, ARCHITECTURES
from .companions import (
    BLOCK,
    companions_of,
    encoded,
    published_recipe,
    special_ids,
    tokenizer_files,
)
from .config import find_architecture, is_interleaved, misfits, write_config
from .published import FP8, SCALE, blocks_of
from .tensors import PublishedRows, TensorLayout, published_shapes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?([KMGT])(I?)B", re.ASCII)
_REPLACED = {
    "quantization_config", "rope_parameters", "auto_map", "transformers_version", "torch_dtype", "dtype", "layer_types",
    "head_dim", "qk_head_dim", "num_experts", "num_local_experts",
}  # fmt: skip
"""Keys of the original config.json that may be wrong for the exported model, so they are not copied."""


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """A planned export. read: returns a tensor of the model, by global name, in any dtype.

    shapes: dtype and shape of each published tensor. files: contents of other files, by name. fp8: the recipe in
    which experts are written.
    """

    layout: TensorLayout
    dtype: torch.dtype
    read: Callable[[str], Tensor]
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    config: Mapping[str, Any]
    files: Mapping[str, bytes]
    fp8: Fp8Recipe | None = None
    update_norms: Mapping[str, float] = field(default_factory=dict)
    """The norms of what adapters add to the weights that `read` has returned, by global name."""
    _errors: dict[str, float] = field(default_factory=dict)
    config_file: ClassVar[str] = CONFIG_FILE

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each tensor, by its published name."""
        return {name: dtype.itemsize * math.prod(shape) for name, (dtype, shape) in self.shapes.items()}

    def shards(self, max_shard_size: int | str = "5GB") -> dict[str, list[str]]:
        """The names of the tensors in each safetensors file. Raises ValueError for a size that is invalid.

        max_shard_size: bytes of tensors in a file, or a text such as "5GB". A larger tensor has its own file.
        """
        shards = divide(self.sizes, parse_size(max_shard_size))
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        return dict(zip(names if len(shards) > 1 else [SINGLE_FILE], shards, strict=True))

    def write(self, folder: Path, max_shard_size: int | str = "5GB") -> None:
        """Write the files into the new folder `folder`, which may stand for a URL. Collective: ranks write different
        files.

        Raises ValueError on all ranks if `folder` exists, or a tensor cannot be read or does not fit its dtype, and
        OSError if a file cannot be written. After an error, the unfinished folder is removed.
        """
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        shards = self.shards(max_shard_size)
        share = dict([*shards.items()][rank::size])

        def write(unfinished: Path) -> None:
            tensors = self.tensors({name for names in share.values() for name in names})
            for file, names in share.items():
                write_tensors(unfinished / file, dict(islice(tensors, len(names))))

        listed = {name: file for file, names in shards.items() for name in names}
        index = {"metadata": {"total_size": sum(self.sizes.values())}, "weight_map": listed}
        files = {**self.files, **({INDEX_FILE: encoded(index)} if len(shards) > 1 else {})}
        write_folder(folder, write, lambda _: {**files, self.config_file: encoded(self.config)})

    def tensors(self, wanted: Set[str]) -> Iterator[tuple[str, Tensor]]:
        """The published tensors with these names, in the planned order."""
        for target in self.layout.targets():
            if not any({part.name, f"{part.name}{SCALE}"} & wanted for part in target.parts):
                continue
            for part, rows in zip(target.parts, self.read(target.name).split(target.heights), strict=True):
                if self.fp8 and target.expert:
                    yield from self._in_fp8(part, rows, wanted, target.name)
                elif part.name in wanted:
                    converted = as_dtype(part.name, rows, self.shapes[part.name][0])
                    self._note_error(target.name, rows, converted)
                    yield part.name, part.to_published(converted)
        ours = {part.name: target.name for target in self.layout.targets() for part in target.parts}
        for name, original in self.layout.copies().items():
            if name in wanted:
                yield name, as_dtype(name, self.read(ours[original]), self.dtype)
        for name, shape in self.layout.unused().items():
            if name in wanted:
                yield name, torch.zeros(shape, dtype=self.dtype)

    def _note_error(self, name: str, exact: Tensor, written: Tensor) -> None:
        if name in self.update_norms:
            self._errors[name] = self._errors.get(name, 0.0) + (exact.double() - written.double()).square().sum().item()

    def describe_loss(self) -> str:
        """How much of the updates of adapters rounding has lost in what was written; "" if nothing. Collective."""
        own = sum(self._errors.values()), sum(self.update_norms[name] ** 2 for name in self._errors)
        error, update = map(sum, zip(*gather_objects(own), strict=True))
        return f"merging rounds away {math.sqrt(error / update):.2%} of what the adapters have learned" if error else ""

    def _in_fp8(self, part: PublishedRows, rows: Tensor, wanted: Set[str], name: str) -> Iterator[tuple[str, Tensor]]:
        """A weight and its scales. It is rounded twice, so that reading it and rounding again changes nothing."""
        assert self.fp8
        weight = exact = part.to_published(as_dtype(part.name, rows, torch.float32))
        for _ in range(2):
            matrix = self.fp8.quantize_weights(weight)
            weight = matrix.read()
        self._note_error(name, exact, weight)
        for name, tensor in ((part.name, matrix.stored), (f"{part.name}{SCALE}", matrix.scales)):
            if name in wanted:
                yield name, tensor


def plan_export(
    model: ModelConfig, read: Callable[[str], Tensor], *, dtype: torch.dtype | None = None,
    companions: Mapping[str, str] | None = None, tokenizer: Tokenizer | None = None, fp8: Fp8Recipe | None = None,
    update_norms: Mapping[str, float] | None = None,
) -> ExportPlan:  # fmt: skip
    """Plan to write a model whose tensors `read` returns.

    companions: the files of the model from which the run started. The architecture is that of `companions`, if it fits,
    or the first that can express the model. dtype: None: that of `companions`, or float32, or bfloat16 with fp8.
    tokenizer: also write its files, except those that `companions` has. fp8: write experts in 8 bits, as DeepSeek-V3
    does, and all else in `dtype`.

    Raises ValueError if no published architecture can express the model.
    """
    companions = companions or {}
    source = parse_one(companions, CONFIG_FILE)
    layout, config, fits = _written_config(model, source)
    if not fits:
        config |= special_ids(tokenizer, source)
    stored = DTYPES.get(str(source.get("torch_dtype") or source.get("dtype") or ""))
    dtype = dtype or stored or (torch.bfloat16 if fp8 else torch.float32)
    names = {value: name for name, value in DTYPES.items()}
    if dtype not in names:
        raise ValueError(f"an export has dtype {', '.join(DTYPES)}: got {dtype}")
    config["torch_dtype"] = names[dtype]
    shapes = published_shapes(layout)
    shapes |= {name: shapes[original] for name, original in layout.copies().items()} | layout.unused()
    planned = {
        name: (torch.float32 if name.endswith("e_score_correction_bias") else dtype, shape)
        for name, shape in shapes.items()
    }
    if fp8:
        if not fp8.weight_rows == fp8.block == BLOCK:
            raise ValueError(f"published weights in fp8 have blocks of {BLOCK} x {BLOCK}: use the recipe ue8m0 or fp32")
        quantized = {part.name for target in layout.targets() if target.expert for part in target.parts}
        planned = dict(_with_scales(planned, quantized))
        full = [
            name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2 and name not in quantized
        ]
        config["quantization_config"] = {**FP8, "activation_scheme": "dynamic", "modules_to_not_convert": full}
        config["quantization_config"] |= {"scale_fmt": "ue8m0"} if fp8.power_of_two else {}
    files = {name: text.encode() for name, text in companions.items() if name != CONFIG_FILE}
    files |= tokenizer_files(tokenizer, alone=CONFIG_FILE in companions)
    return ExportPlan(layout, dtype, read, planned, config, files, fp8, {} if update_norms is None else update_norms)


def _written_config(model: ModelConfig, source: Mapping[str, Any]) -> tuple[TensorLayout, dict[str, Any], bool]:
    """The published tensors of an export, its config.json, and whether they are those of `source`, a config.json."""
    kind = str(source.get("model_type"))
    started = ARCHITECTURES.get(ALIASES.get(kind, kind))
    fits = bool(started and not model.own_layers and not misfits(model, started))
    found = started if started and fits else find_architecture(model)
    config = write_config(model, found)
    if fits:
        config = {**{key: value for key, value in source.items() if key not in _REPLACED}, **config}
        config["max_position_embeddings"] = source.get("max_position_embeddings", config["max_position_embeddings"])
    return TensorLayout(model, found, found.interleaved and is_interleaved(config)), config, fits


def layout_of(model: ModelConfig, companions: Mapping[str, str]) -> TensorLayout:
    """The published tensors of a model that started from the folder with these files. Raises ValueError if no published
    architecture can express it."""
    return _written_config(model, parse_one(companions, CONFIG_FILE))[0]


def _with_scales(
    planned: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], quantized: Set[str]
) -> Iterator[tuple[str, tuple[torch.dtype, tuple[int, ...]]]]:
    for name, (dtype, shape) in planned.items():
        yield name, (FP8_DTYPE if name in quantized else dtype, shape)
        if name in quantized:
            yield f"{name}{SCALE}", (torch.float32, blocks_of(shape))


def save_pretrained(
    model: TransformerStage, folder: str | os.PathLike[str], max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None, tokenizer: Tokenizer | None = None, fp8: Fp8Recipe | None = None,
) -> None:  # fmt: skip
    """Write a whole model into the new folder `folder`: config.json, safetensors files, and `model.companions`.

    dtype: of the written weights; None: that of the model. The architecture is that of the folder from which the model
    was loaded, or without one the first that can express it. tokenizer: also write its files; None: those of the folder
    from which the model was loaded. fp8: write experts in 8 bits, with scales for blocks of 128 x 128.

    Raises ValueError if no published architecture can express the model, if `folder` exists, and for a weight that is
    not finite or too large for `dtype`, and OSError if a file cannot be written. After an error, the unfinished folder
    is removed.
    """
    weights = global_weights(model)
    missing = [part for part in ("embedding", "head") if not getattr(model.spec, part)]
    if missing or len(model.spec.layers) < model.config.num_layers:
        raise ValueError(
            "save_pretrained needs a whole model: this is one pipeline stage; export a checkpoint of the run"
        )
    dtype = dtype or next(model.parameters()).dtype
    plan = plan_export(
        model.config, lambda name: weights[name].detach().cpu(), dtype=dtype, companions=model.companions,
        tokenizer=tokenizer, fp8=fp8,
    )  # fmt: skip
    plan.write(Path(folder), max_shard_size)


def plan_checkpoint_export(checkpoint: Path, dtype: torch.dtype | None = None) -> ExportPlan:
    """Plan to write the weights of a checkpoint, with its tokenizer and the files of the model that it started from.

    dtype: of all weights. None: the experts of a run in FP8 are written in FP8.

    Raises ValueError if the checkpoint is unreadable, or if no published architecture can express its model.
    """
    saved = SavedModel(checkpoint)
    plan = plan_export(
        saved.config, saved.tensor, dtype=dtype, companions=companions_of(checkpoint),
        tokenizer=find_tokenizer(checkpoint), fp8=None if dtype else published_recipe(checkpoint),
        update_norms=saved.update_norms,
    )  # fmt: skip
    targets = {target.name: target.shape for target in plan.layout.targets()}
    if wrong := sorted(targets.items() ^ saved.shapes.items()):
        raise ValueError(f"{printable(checkpoint)}: {printable(wrong[0][0])} does not fit its model")
    return plan


def as_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor to write as `name`, in `dtype`. Raises ValueError if it would hold a NaN or infinity."""
    converted = tensor.to(dtype)
    if converted.numel() and not all(torch.stack(converted.aminmax()).isfinite()):  # a mask would need more memory
        largest = tensor.abs().max().item()
        if math.isfinite(largest):
            limit = torch.finfo(dtype).max
            raise ValueError(f"{name} holds {largest:.4g}, and {dtype} at most {limit:.4g}: choose another dtype")
        raise ValueError(f"{name} holds a NaN or infinity: export an earlier checkpoint")
    return converted


def parse_size(size: int | str) -> int:
    """Return a number of bytes: 5GB is 5 x 1000^3, 5GiB is 5 x 1024^3. Raises ValueError."""
    if isinstance(size, str) and (match := _SIZE.fullmatch(size.strip().upper())):
        number, unit, binary = match.groups()
        size = int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(unit) + 1))
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"a shard size is a number of bytes, or a text such as 5GB: got {quoted(size, 60)}")
    return size
