"""Read the tensors of a Hugging Face checkpoint, one at a time.

A folder has all tensors in model.safetensors, or in shards that model.safetensors.index.json lists. Opening it reads
only headers. Each tensor is read on demand, so the memory needed is that of one tensor.

Folders are not trusted. The index may name only files in its own folder, and must agree with all headers. The files may
be symbolic links, as in the cache of huggingface_hub. Pickles are refused.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..data.stores import exists, sizes_of
from ..data.strict_json import read_file
from ..messages import plural, printable, quoted
from .manifest import reading, valid_file_name
from .tensor_file import TensorEntry, TensorFile

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_PICKLES = {".bin", ".pt", ".pth", ".ckpt"}


class TensorFolder:
    """The tensors of a folder with model.safetensors, or else with shards and model.safetensors.index.json.

    entries: where each tensor is stored, by name. bytes_read: bytes of tensors read so far.

    Raises ValueError, in one line that names the file, if the folder has no such weights or a file is invalid.
    """

    def __init__(self, folder: Path):
        self.folder, self.bytes_read = folder, 0
        if exists(folder / SINGLE_FILE):
            files = [TensorFile(folder / SINGLE_FILE)]
        elif exists(folder / INDEX_FILE):
            files = _read_shards(folder / INDEX_FILE)
        else:
            raise ValueError(_why_no_weights(folder))
        self._files = {file.path: file for file in files}
        self.entries: Mapping[str, TensorEntry] = {
            name: entry for file in files for name, entry in file.entries.items()
        }

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Return a tensor, as a new CPU tensor in the stored dtype.

        index: return only this entry of the first dimension, and read only its bytes.

        Raises ValueError for an unknown name and for a file that cannot be read, and IndexError for an invalid index.
        """
        if (entry := self.entries.get(name)) is None:
            raise ValueError(f"{printable(self.folder)} has no tensor {quoted(name)}")
        shape, start, size = entry.shape, entry.start, entry.nbytes
        if index is not None:
            if not shape or not 0 <= index < shape[0]:
                raise IndexError(f"{quoted(name)} of shape {[*shape]} has no entry {index}")
            size //= shape[0]
            shape, start = shape[1:], start + index * size
        data = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._files[entry.file].read(start, data)
        self.bytes_read += size
        return data.view(entry.dtype).reshape(shape)


def _read_shards(index: Path) -> list[TensorFile]:
    """Open the files that an index lists. It must list every tensor of each, and no others.

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
    shards = {name: TensorFile(index.with_name(name)) for name in names}
    with reading(index):
        for file, shard in shards.items():
            for name in shard.entries:
                if (other := listed.get(name)) is None:
                    raise ValueError(f"it does not list {quoted(name, 60)} of {file}")
                if other != file:
                    raise ValueError(f"it lists {quoted(name, 60)} in {other}, but {file} has a tensor of this name")
        for name, file in listed.items():
            if name not in shards[file].entries:
                raise ValueError(f"it lists {quoted(name, 60)} in {file}, which does not have it")
    return [*shards.values()]


def _why_no_weights(folder: Path) -> str:
    with reading(folder):
        found = [name for name in sizes_of(folder) if Path(name).suffix in {*_PICKLES, ".safetensors"}]
    shown = printable(folder)
    if found and not any(name.endswith(".safetensors") for name in found):
        way = f"AutoModelForCausalLM.from_pretrained({shown!r}).save_pretrained({shown + '-safetensors'!r})"
        risk = f"{shown} holds weights as pickles, which can run code ({printable(found[0], 60)})"
        return f"{risk}: convert them to safetensors first: with the transformers library, {way}"
    only = f", only {printable(found[0], 60)}" if found else ""
    return f"{shown} has neither {SINGLE_FILE} nor {INDEX_FILE}{only}"
