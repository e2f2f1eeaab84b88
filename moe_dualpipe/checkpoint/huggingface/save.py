"""Write a model, or a checkpoint of any parallel layout, in the format that transformers, vLLM and SGLang read.

Tensors are written one file at a time, in the order of the layers: the memory needed is that of a file and a small
multiple of the largest tensor, for a model of any size. Ranks divide the files among themselves. The folder gets its
name when all of its files are on disk.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...data import TOKENIZER_FILE, Tokenizer, find_tokenizer
from ...messages import plural, printable
from ...models import ModelConfig, TransformerStage
from ..atomic_folder import write_folder
from ..manifest import read_manifest
from ..model_options import model_config
from ..tensor_file import write_tensors
from ..tensor_folder import TensorFolder
from ..tensor_writer import Shards, as_dtype
from ..weights import global_weights
from .architectures import ALIASES, ARCHITECTURES
from .companions import companions_of, published_config
from .config import find_architecture, is_interleaved, misfits, write_config
from .published import CONFIG_FILE
from .tensors import Layout, published_shapes
from .tokenizer import special_ids, tokenizer_files

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_REPLACED = {
    "quantization_config", "rope_parameters", "auto_map", "transformers_version", "torch_dtype", "dtype", "layer_types",
    "head_dim", "qk_head_dim", "num_experts", "num_local_experts",
}  # fmt: skip
"""Keys of the original config.json that may be wrong for the exported model, so they are not copied."""


@dataclass(frozen=True, slots=True)
class Export:
    """A planned export. read: returns a tensor of the model, by global name, in any dtype.

    files: contents of other files, by name.
    """

    layout: Layout
    dtype: torch.dtype
    read: Callable[[str], Tensor]
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    config: Mapping[str, Any]
    files: Mapping[str, bytes]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in self.shapes.values())

    def shards(self, max_shard_size: int | str = "5GB") -> Shards:
        """The safetensors files of an export. Raises ValueError for a size that is invalid."""
        return Shards(self.shapes, max_shard_size)

    def peak_bytes(self, max_shard_size: int | str = "5GB") -> int:
        """Peak memory for tensors: the largest file, and three times the largest tensor in fp32.

        Reading holds the stored bytes and the tensor. The allocator may keep a third one that was freed.
        """
        largest = max(torch.Size(target.shape).numel() for target in self.layout.targets())
        return self.shards(max_shard_size).largest + 3 * 4 * largest

    def write(self, folder: Path, max_shard_size: int | str = "5GB") -> None:
        """Write the files into the new folder `folder`, which may stand for a URL. Collective: ranks write different
        shards.

        Raises ValueError on all ranks if `folder` exists, or a tensor cannot be read or does not fit its dtype, and
        OSError if a file cannot be written. After an error, the unfinished folder is removed.
        """
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        shards = self.shards(max_shard_size)
        share = dict([*shards.files.items()][rank::size])

        def write(unfinished: Path) -> None:
            tensors = self._tensors({name for names in share.values() for name in names})
            for file, names in share.items():
                write_tensors(unfinished / file, dict(islice(tensors, len(names))))

        config = (json.dumps(self.config, indent=2) + "\n").encode()
        write_folder(folder, write, lambda _: {**shards.index(), **self.files, CONFIG_FILE: config})

    def _tensors(self, wanted: set[str]) -> Iterator[tuple[str, Tensor]]:
        """The published tensors with these names, in the planned order."""
        for target in self.layout.targets():
            if not any(part.name in wanted for part in target.parts):
                continue
            sizes = [part.shape[0] for part in target.parts]
            for part, rows in zip(target.parts, self.read(target.name).split(sizes), strict=True):
                if part.name in wanted:
                    converted = as_dtype(part.name, rows, self.shapes[part.name][0])
                    yield part.name, part.to_published(converted)
        ours = {part.name: target.name for target in self.layout.targets() for part in target.parts}
        for name, original in self.layout.copies().items():
            if name in wanted:
                yield name, as_dtype(name, self.read(ours[original]), self.dtype)
        for name, shape in self.layout.unused().items():
            if name in wanted:
                yield name, torch.zeros(shape, dtype=self.dtype)


def plan_export(
    model: ModelConfig, read: Callable[[str], Tensor], *, dtype: torch.dtype | None = None, architecture: str = "",
    companions: Mapping[str, str] | None = None, tokenizer: Tokenizer | None = None,
) -> Export:  # fmt: skip
    """Plan to write a model whose tensors `read` returns.

    companions: the files of the model from which the run started. dtype: None: that of `companions`, or float32.
    architecture: "": that of `companions`, if it fits, or the first that can express the model. tokenizer: also write
    its files, except those that `companions` has.

    Raises ValueError if no published architecture can express the model.
    """
    companions = companions or {}
    source = published_config(companions)
    kind = str(source.get("model_type"))
    started = ARCHITECTURES.get(ALIASES.get(kind, kind))
    if not architecture and started and not model.own_layers and not misfits(model, started):
        architecture = started.model_type
    found = find_architecture(model, architecture)
    config = write_config(model, found)
    if started == found:
        config = {**{key: value for key, value in source.items() if key not in _REPLACED}, **config}
        config["max_position_embeddings"] = source.get("max_position_embeddings", config["max_position_embeddings"])
    else:
        config |= special_ids(tokenizer, source)
    stored = DTYPES.get(str(source.get("torch_dtype") or source.get("dtype") or ""))
    dtype = dtype or stored or torch.float32
    names = {value: name for name, value in DTYPES.items()}
    if dtype not in names:
        raise ValueError(f"an export has dtype {', '.join(DTYPES)}: got {dtype}")
    config["torch_dtype"] = names[dtype]
    interleaved = found.interleaved and is_interleaved(config)
    layout = Layout(model, found, interleaved=interleaved)
    shapes = published_shapes(layout)
    shapes |= {name: shapes[original] for name, original in layout.copies().items()} | layout.unused()
    planned = {
        name: (torch.float32 if name.endswith("e_score_correction_bias") else dtype, shape)
        for name, shape in shapes.items()
    }
    files = tokenizer_files(tokenizer)
    if companions:
        files = {name: files[name] for name in files if name == TOKENIZER_FILE}
        files |= {name: text.encode() for name, text in companions.items()}
    return Export(layout, dtype, read, planned, config, files)


def save_pretrained(
    model: TransformerStage, folder: str | os.PathLike[str], max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None, architecture: str = "", tokenizer: Tokenizer | None = None,
) -> None:  # fmt: skip
    """Write a whole model into the new folder `folder`: config.json, safetensors files, and `model.companions`.

    dtype: of the written weights; None: that of the model. architecture: a `model_type` such as "mixtral"; "": that of
    the folder from which the model was loaded, or without one the first that can express it. tokenizer: also write its
    files; None: those of the folder from which the model was loaded.

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
    companions = dict(model.companions)
    own_tokenizer = companions.pop(TOKENIZER_FILE, None)
    plan = plan_export(
        model.config, lambda name: weights[name].detach().cpu(), dtype=dtype, architecture=architecture,
        companions=companions, tokenizer=tokenizer,
    )  # fmt: skip
    if tokenizer is None and own_tokenizer is not None:
        plan = dataclasses.replace(plan, files={**plan.files, TOKENIZER_FILE: own_tokenizer.encode()})
    plan.write(Path(folder), max_shard_size)


def plan_checkpoint_export(checkpoint: Path, dtype: torch.dtype | None = None, architecture: str = "") -> Export:
    """Plan to write the weights of a checkpoint, with its tokenizer and the files of the model that it started from.

    Raises ValueError if the checkpoint is unreadable, or if no published architecture can express its model.
    """
    manifest = read_manifest(checkpoint)
    try:
        model = model_config(manifest.model)
    except ValueError as error:
        raise ValueError(f"cannot read the model of {printable(checkpoint)}: {printable(error)}") from None
    saved = TensorFolder(checkpoint, manifest)
    plan = plan_export(
        model, lambda name: saved.read(f"model.{name}"), dtype=dtype, architecture=architecture,
        companions=companions_of(checkpoint), tokenizer=find_tokenizer(checkpoint),
    )  # fmt: skip
    shapes = {name: entry.shape for name, entry in saved.entries.items()}
    targets = {f"model.{target.name}": target.shape for target in plan.layout.targets()}
    problems = [name for name, shape in targets.items() if shapes.get(name) != shape]
    problems += [name for name in shapes if name.startswith("model.") and name not in targets]
    if problems:
        more = f", and {plural(len(problems) - 1, 'more tensor')}" if len(problems) > 1 else ""
        raise ValueError(f"{printable(checkpoint)}: {printable(problems[0])} does not fit its model{more}")
    return plan
