"""Read the tensors of a folder, one at a time: a checkpoint, an export, or a published model.

A published model has all tensors in model.safetensors, or in shards that model.safetensors.index.json lists. A
checkpoint has them in the safetensors files that run.json lists. Opening a folder reads only headers. Tensors are read
on demand, so the memory needed is that of one tensor.

Folders are not trusted. The index may name only files in its own folder, and must agree with all headers. The files of
a published model may be symbolic links, as in the cache of huggingface_hub. Pickles are refused.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.stores import drop, exists, fetch
from ..data.strict_json import read_file
from ..messages import plural, printable, quoted
from .manifest import Manifest, reading, valid_file_name
from .tensor_file import TensorEntry, open_file, read_header

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


class TensorFolder:
    """The tensors of a folder with model.safetensors, or with shards and model.safetensors.index.json.

    checkpoint: the contents of run.json, which lists the files of a checkpoint.

    entries: where each tensor is stored, by name. bytes_read: bytes of tensors read so far.

    Raises ValueError, in one line that names the file, if the folder has no such weights or a file is invalid.
    """

    def __init__(self, folder: Path, checkpoint: Manifest | None = None):
        self.folder, self.bytes_read = folder, 0
        self._checksums = {name: file.crc32 for name, file in checkpoint.files.items()} if checkpoint else {}
        if checkpoint:
            headers = {name: read_header(folder / name) for name in self._checksums if name.endswith(".safetensors")}
        elif exists(folder / SINGLE_FILE):
            headers = {SINGLE_FILE: read_header(folder / SINGLE_FILE)}
        elif exists(folder / INDEX_FILE):
            headers = _read_shards(folder / INDEX_FILE)
        else:
            shown = printable(folder)
            way = f"AutoModelForCausalLM.from_pretrained({shown!r}).save_pretrained({shown + '-safetensors'!r})"
            raise ValueError(
                f"{shown} has neither {SINGLE_FILE} nor {INDEX_FILE}; pickles (.bin, .pt) can run code, so they are "
                f"not read: convert them with the transformers library, {way}"
            )
        self._statuses = {name: status for name, (status, _) in headers.items()}
        self.entries: Mapping[str, TensorEntry] = {
            name: entry for _, entries in headers.values() for name, entry in entries.items()
        }

    def by_position(self, names: Iterable[str]) -> list[str]:
        """Names in the order of the files and bytes, in which reading is fastest."""
        return sorted(names, key=lambda name: (self.entries[name].file, self.entries[name].start))

    def read(self, name: str) -> Tensor:
        """Return a tensor, as a new CPU tensor in the stored dtype.

        Raises ValueError for an unknown name and for a file that cannot be read.
        """
        if (entry := self.entries.get(name)) is None:
            raise ValueError(f"{printable(self.folder)} has no tensor {quoted(name)}")
        if (file := entry.file.name) in self._checksums:
            fetch(entry.file, self._checksums[file])
        data = torch.empty(entry.nbytes, dtype=torch.uint8, device="cpu")
        with open_file(entry.file, self._statuses.get(file)) as opened:
            opened.read_into(entry.start, data.numpy().data)
        self.bytes_read += entry.nbytes
        return data.view(entry.dtype).reshape(entry.shape)

    def close(self) -> None:
        """Remove the copies of files on a store."""
        drop(self.folder, {entry.file.name for entry in self.entries.values()})


def _read_shards(index: Path) -> dict[str, tuple[Any, dict[str, TensorEntry]]]:
    """Read the headers of the files that an index lists. It must list every tensor of each, and no others.

    Its metadata is ignored: the total_size of many published checkpoints is wrong.
    """
    with reading(index):
        value = read_file(index)
        if not isinstance(value, dict) or not isinstance(listed := value.get("weight_map"), dict):
            raise ValueError("it has no weight_map")
        names = dict.fromkeys(map(valid_file_name, listed.values()))
        if missing := [name for name in names if not exists(index.with_name(name))]:
            more = f", and {plural(len(missing) - 1, 'more file')}" if len(missing) > 1 else ""
            raise ValueError(
                f"it lists {printable(missing[0], 60)}{more}, not found: download or copy the folder again"
            )
    shards = {name: read_header(index.with_name(name)) for name in names}
    stored = {(name, file) for file, (_, entries) in shards.items() for name in entries}
    if wrong := stored ^ {*listed.items()}:
        name, file = min(wrong)
        problem = "has it, but it is not listed there" if (name, file) in stored else "does not have it"
        raise ValueError(f"cannot read {index}: of {quoted(name, 60)}, {file} {problem}")
    return shards
